"""Hugging Face Accelerate over MPI: ranks, process group, and gradients averaged by a method of mpicomp.

Accelerate takes exact classes of its own as handlers, and no hooks but those of PyTorch: so this is an `Accelerator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.annotations import override
from mpicomp.torch import DDPHookState, ddp_hook
from mpicomp.torch.front_ends import AlgorithmChoice, with_seed
from mpicomp.torch.process_group.joining import join_process_group
from mpicomp.torch.process_group.survivors import OnFailure, broadcast_from, gather_rows, open_communicator, reduce_rows
from mpicomp.torch.state.rank_files import load_beside, remove_beside, save_beside

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils.operations import recursively_apply
except ImportError as error:
    raise ImportError(f"mpicomp.accelerate needs Accelerate ({error}): pip install accelerate") from error

RANK_FILES = "mpicomp"
"""Beginning of the names of the ranks' files in a folder of `save_state`, or of the Trainer's checkpoints."""


def share_order(loader: Any, comm: Communicator) -> None:
    """Make the shuffled orders of a prepared loader equal once, in place of before each epoch; collective.

    Every rank draws the same numbers from then on.
    """
    generator = getattr(loader, "synchronized_generator", None)
    if generator is not None:
        generator.set_state(broadcast_from(comm, generator.get_state(), 0))
    loader.rng_types = None


class SurvivingAccelerator(Accelerator):
    """Accelerator whose own exchanges are among survivors if the communicator regroups: its process group has ended."""

    comm: Communicator

    def adopt_numbers(self) -> None:
        """Number the processes as the communicator does: a death changes its numbers."""
        if self._regroups:
            for state in (PartialState, AcceleratorState):
                numbers = {"process_index": self.comm.rank, "num_processes": self.comm.size}
                state._shared_state.update(numbers, local_process_index=self.comm.local_rank)

    @property
    def _regroups(self) -> bool:
        return self.comm.recovery is not None

    @override
    def prepare_data_loader(self, *arguments: Any, **options: Any) -> Any:
        loader = super().prepare_data_loader(*arguments, **options)
        if self._regroups:
            share_order(loader, self.comm)
        return loader

    @override
    def wait_for_everyone(self) -> None:
        if self._regroups:
            self.comm.barrier()
            self.adopt_numbers()
        else:
            super().wait_for_everyone()

    @contextmanager
    @override
    def main_process_first(self) -> Iterator[None]:
        with self._go_first(self.comm.rank == 0) if self._regroups else super().main_process_first():
            yield

    @contextmanager
    @override
    def local_main_process_first(self) -> Iterator[None]:
        with self._go_first(self.comm.local_rank == 0) if self._regroups else super().local_main_process_first():
            yield

    @contextmanager
    def _go_first(self, leads: bool) -> Iterator[None]:
        if not leads:
            self.wait_for_everyone()
        yield
        if leads:
            self.wait_for_everyone()

    @override
    def save_state(self, *arguments: Any, **options: Any) -> Any:
        if self._regroups:
            self.wait_for_everyone()  # notices deaths, after which another rank saves the model
        return super().save_state(*arguments, **options)

    @override
    def gather(self, tensor: Any) -> Any:
        if not self._regroups:
            return super().gather(tensor)
        rows = partial(gather_rows, self.comm)
        gathered = recursively_apply(lambda one: rows(one.reshape(one.shape or (1,))).flatten(0, 1), tensor)
        self.adopt_numbers()
        return gathered

    @override
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if not self._regroups or reduction == "none":
            return super().reduce(tensor, reduction, scale)
        reduced = recursively_apply(lambda one: reduce_rows(self.comm, one, reduction), tensor)
        self.adopt_numbers()
        return reduced

    @override
    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        if not self._regroups:
            return super().pad_across_processes(tensor, dim, pad_index, pad_first)

        def pad(one: torch.Tensor) -> torch.Tensor:
            length = self.comm.allreduce(one.shape[dim] if -one.ndim <= dim < one.ndim else 0, "max")
            if length == 0 or length == one.shape[dim]:
                return one
            shape = [length - n if place == dim % one.ndim else n for place, n in enumerate(one.shape)]
            padding = one.new_full(shape, pad_index)
            return torch.cat([padding, one] if pad_first else [one, padding], dim)

        return recursively_apply(pad, tensor)


class MPIAccelerator(SurvivingAccelerator):
    """Accelerator over MPI, for programs that ``mpirun`` or ``srun`` starts, without ``accelerate launch``.

    ``prepare`` wraps models in DistributedDataParallel, whose gradients the method averages. ``save_state`` also writes
    the residuals of each rank, and ``load_state`` restores them, also on another number of ranks.

    Parameters
    ----------
    algorithm : Algorithm, mapping or callable, optional
        Method, or methods by patterns of parameters' names, as for `ddp_hook`. None: gradients are averaged in full
        precision by PyTorch's DDP over MPI.
    comm : Communicator, optional
        All ranks; None makes one, which `end_training` closes.
    on_failure : "raise" or "regroup"
        Option of the communicator that the accelerator makes: after the death of a rank raise `PeerFailure`, or go on
        with the others; see `mpicomp help faults`.
    **options
        Options of `accelerate.Accelerator`; ``cpu`` is True by default where PyTorch finds no GPU.

    Attributes
    ----------
    comm : Communicator
    states : list of DDPHookState
        State of the hook of each prepared model, in order.

    Raises
    ------
    ValueError
        WORLD_SIZE contradicts MPI, as where ``accelerate launch`` has started the program. Or an algorithm is given,
        and Accelerate trains by FSDP or DeepSpeed, or with a gradient scaler.

    Examples
    --------
    >>> import mpicomp
    >>> import torch
    >>> from mpicomp.accelerate import MPIAccelerator
    >>> accelerator = MPIAccelerator(mpicomp.Relay())
    >>> model = accelerator.prepare(torch.nn.Linear(16, 1))
    >>> accelerator.num_processes
    1
    >>> accelerator.end_training()
    """

    def __init__(
        self,
        algorithm: AlgorithmChoice | None = None,
        comm: Communicator | None = None,
        *,
        on_failure: OnFailure = "raise",
        **options: Any,
    ) -> None:
        join_process_group()
        options.setdefault("cpu", not torch.cuda.is_available())
        super().__init__(**options)
        if algorithm is not None:
            self._require_ddp()
        self._owns_comm = comm is None
        self.comm = open_communicator(comm, on_failure, algorithm)
        self.algorithm = algorithm
        self.states: list[DDPHookState] = []
        self.register_save_state_pre_hook(self._save_ranks)
        self.register_load_state_pre_hook(self._load_ranks)

    def _require_ddp(self) -> None:
        if self.num_processes > 1 and not self.distributed_type.value.startswith("MULTI_"):
            raise ValueError(
                f"Accelerate trains by {self.distributed_type.value}, where no method averages gradients: leave out "
                "its plugin, or the algorithm"
            )
        if self.scaler is not None:
            raise ValueError(
                "the gradient scaler of mixed_precision='fp16' lets gradients overflow, which the method refuses: use "
                "bf16, as in mixed_precision='bf16'"
            )

    @override
    def prepare_model(self, model: torch.nn.Module, *arguments: Any, **options: Any) -> torch.nn.Module:
        prepared: torch.nn.Module = super().prepare_model(model, *arguments, **options)
        wrapped = getattr(prepared, "_orig_mod", prepared)  # of a compiled model
        if isinstance(wrapped, DistributedDataParallel) and wrapped is not model and self.algorithm is not None:
            state, hook = ddp_hook(with_seed(self.algorithm, len(self.states)), self.comm, wrapped)
            wrapped.register_comm_hook(state, hook)
            self.states.append(state)
        return prepared

    @override
    def free_memory(self, *objects: Any) -> Any:
        self.states.clear()
        return super().free_memory(*objects)

    def stop_requested(self) -> bool:
        """Return True on all ranks once SIGTERM or SIGUSR1 has come to any of them; call it in every step."""
        requested = self.comm.stop_requested()
        self.adopt_numbers()
        return requested

    def _save_ranks(self, models: object, weights: object, folder: str) -> None:
        if self.states:
            save_beside(Path(folder) / RANK_FILES, self.states, self.comm)
        elif self.comm.rank == 0:
            remove_beside(Path(folder) / RANK_FILES)  # of an earlier checkpoint

    def _load_ranks(self, models: object, folder: str) -> None:
        if self.states and not load_beside(Path(folder) / RANK_FILES, self.states, self.comm) and self.comm.rank == 0:
            self.print(f"{folder} has no files of ranks: the residuals of {self.algorithm} start at zero")

    @override
    def end_training(self) -> None:
        if self._owns_comm:
            self.comm.close()
        super().end_training()
