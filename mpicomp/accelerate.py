"""Hugging Face Accelerate over MPI: ranks, process group, and gradients averaged by a method of mpicomp.

Accelerate takes exact classes of its own as handlers, and no hooks but those of PyTorch: so this is an `Accelerator`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.annotations import override
from mpicomp.torch import DDPHookState, ddp_hook
from mpicomp.torch.ddp.hook import with_seed
from mpicomp.torch.front_ends import AlgorithmChoice
from mpicomp.torch.process_group.joining import join_process_group
from mpicomp.torch.state.rank_files import load_beside, remove_beside, save_beside

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(f"mpicomp.accelerate needs Accelerate ({error}): pip install accelerate") from error

RANK_FILES = "mpicomp"
"""Beginning of the names of the ranks' files in a folder of `save_state`."""


class MPIAccelerator(Accelerator):
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
    >>> accelerator = MPIAccelerator(mpicomp.DoubleSqueeze())
    >>> model = accelerator.prepare(torch.nn.Linear(16, 1))
    >>> accelerator.num_processes
    1
    >>> accelerator.end_training()
    """

    def __init__(
        self, algorithm: AlgorithmChoice | None = None, comm: Communicator | None = None, **options: Any
    ) -> None:
        join_process_group()
        options.setdefault("cpu", not torch.cuda.is_available())
        super().__init__(**options)
        if algorithm is not None:
            self._require_ddp()
        self._owns_comm = comm is None
        self.comm = Communicator() if comm is None else comm
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
        return self.comm.stop_requested()

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
