"""Strategies of PyTorch Lightning: ranks, process group and gradient averaging over MPI.

``Trainer(strategy=MPIStrategy(mpicomp.PowerSGD(rank=4)))`` under ``mpirun`` or ``srun``; `mpicomp help integrations`
has complete programs.
"""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from collectives import Communicator
from collectives.annotations import override
from collectives.recovery.fault_tolerance import repeat_after_deaths
from mpicomp.torch import DistributedOptimizer, average_buffers, broadcast_parameters, ddp_hook, register_backend
from mpicomp.torch.front_ends import AlgorithmChoice, with_seed
from mpicomp.torch.process_group.joining import join_process_group
from mpicomp.torch.process_group.survivors import OnFailure, broadcast_from, gather_rows, open_communicator, reduce_rows
from mpicomp.torch.state.rank_files import load_beside, remove_beside, save_beside
from mpicomp.torch.state.schema import wrapped_part

try:
    from lightning.pytorch.plugins.environments import MPIEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
except ImportError as error:
    raise ImportError(f"mpicomp.lightning needs PyTorch Lightning ({error}): pip install lightning") from error

_log = logging.getLogger("mpicomp")


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


def _local(path: Any) -> Path:
    """Return a checkpoint's file, also where the path is a link to it, as Lightning's ``save_last="link"`` makes it."""
    if _is_remote(path):
        raise ValueError(f"{path} is not in a file system, where each rank can write its residuals: name a folder")
    return Path(path).resolve()


def _require_all_ranks(group: Any) -> None:
    """Raise ValueError for a part of the ranks, whose process group does not outlive them."""
    if group is not None and group is not torch.distributed.group.WORLD:
        raise ValueError("group= cannot be a part of the ranks where on_failure='regroup': leave it out")


class _OverMPI:
    """Part of a strategy that takes ranks, devices and process group from MPI."""

    algorithm: AlgorithmChoice | None = None
    comm: Communicator | None
    on_failure: OnFailure = "raise"
    stop_checkpoint: str | Path | None

    def _open(self, comm: Communicator | None, stop_checkpoint: str | Path | None) -> None:
        register_backend()
        self.comm, self.stop_checkpoint = comm, stop_checkpoint
        self._owns_comm, self._failed, self._stops = comm is None, False, False
        self._on_sigterm: Any = None

    @property
    def root_device(self) -> torch.device:
        """Device of this rank: a CPU that all ranks of the node share, or a GPU of its own."""
        strategy: Any = self
        devices: list[torch.device] = strategy.parallel_devices
        if devices[0].type == "cpu":
            return devices[0]
        place = int(strategy.local_rank)
        if place >= len(devices):
            raise ValueError(
                f"rank {strategy.global_rank} of {strategy.world_size} is number {place} on its node, and the Trainer "
                f"has {len(devices)} GPUs there: pass devices='auto', or start fewer ranks on a node"
            )
        return devices[place]

    def setup_environment(self) -> None:
        """Join the process group over MPI, make the communicator, and note signals from now on."""
        strategy: Any = self
        join_process_group(strategy._timeout)
        if self.comm is None:
            self.comm = open_communicator(None, self.on_failure, self.algorithm)
        self._failed = self._stops = False
        module = strategy.lightning_module
        if module is not None and module.trainer.state.fn == "fit":
            self.comm.stop_requested()
            self._on_sigterm = signal.getsignal(signal.SIGTERM)
        super().setup_environment()  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Take SIGTERM back from Lightning, whose handler calls a broadcast that other ranks do not reach."""
        if self._on_sigterm is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        super().on_train_start()  # type: ignore[misc]

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Stop on all ranks once a signal has come to one of them, after saving to `stop_checkpoint`."""
        strategy: Any = self
        trainer = strategy.lightning_module.trainer
        assert self.comm is not None
        if self._survivors:
            rank_zero_only.rank = self.comm.rank  # who logs, and writes checkpoints, after a death
        if trainer.should_stop:
            return
        # between steps of the optimizer no accumulated gradient is lost
        if not self._stops and batch_idx % trainer.accumulate_grad_batches == 0 and self.comm.stop_requested():
            self._stops = True
            if self.stop_checkpoint is not None:
                trainer.save_checkpoint(self.stop_checkpoint)
            if self.comm.rank == 0:
                _log.warning("a signal requests a stop: training ends after this step")
        if self._stops and ((batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch):
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0  # else Lightning trains on
            trainer.should_stop = True

    @property
    def _survivors(self) -> Communicator | None:
        """The communicator if it regroups after a death."""
        return self.comm if self.comm is not None and self.comm.recovery is not None else None

    def on_exception(self, exception: BaseException) -> None:
        """Leave the communicator to the end of the process: other ranks may be in another call."""
        self._failed = True
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Close the communicator if the strategy made it, unless the ranks regroup: only it knows who has died."""
        super().teardown()  # type: ignore[misc]
        if self._owns_comm and self.comm is not None and not self._failed and not self._survivors:
            self.comm.close()
            self.comm = None


class MPIStrategy(_OverMPI, DDPStrategy):
    """Data parallelism over MPI, with gradients or updates averaged by a method of mpicomp.

    Start the program with ``mpirun`` or ``srun``; leave out ``devices`` and ``num_nodes`` of the Trainer, which MPI
    determines. Lightning saves the checkpoints. The residuals of each rank are in a file next to them
    (``last.ckpt.rank0-of-4``), and are restored with them, also on another number of ranks.

    Parameters
    ----------
    algorithm : Algorithm, mapping or callable, optional
        Method, or methods by patterns of parameters' names, as for `ddp_hook`. None: gradients are averaged in full
        precision by PyTorch's DDP over MPI.
    comm : Communicator, optional
        All ranks; None makes one, and closes it when the Trainer is done, or with the process where ranks regroup.
    synchronize : "ddp" or "optimizer"
        "ddp": DistributedDataParallel with `ddp_hook`. "optimizer": a `DistributedOptimizer` around each optimizer of
        the module, for methods that average updates, and for several local steps.
    optimizer_options : mapping, optional
        Options of `DistributedOptimizer`, such as ``{"local_steps": 4}``.
    stop_checkpoint : str or Path, optional
        File for a checkpoint when SIGTERM or SIGUSR1 requests a stop on any rank. Training then ends on all ranks.
    on_failure : "raise" or "regroup"
        Option of the communicator that the strategy makes: after the death of a rank raise `PeerFailure`, or go on with
        the others; see `mpicomp help faults`.
    **options
        Options of `lightning.pytorch.strategies.DDPStrategy`, and of DistributedDataParallel.

    Attributes
    ----------
    state : DDPHookState or None
        State of the hook of the last fit.

    Raises
    ------
    ValueError
        `synchronize` is neither "ddp" nor "optimizer", "optimizer" or "regroup" has no algorithm, or a GPU is missing.

    Examples
    --------
    >>> import mpicomp
    >>> from lightning.pytorch import Trainer
    >>> from mpicomp.lightning import MPIStrategy
    >>> trainer = Trainer(strategy=MPIStrategy(mpicomp.Relay()), accelerator="cpu", logger=False)
    >>> trainer.world_size
    1
    """

    optimizers: Any  # of the base

    def __init__(
        self,
        algorithm: AlgorithmChoice | None = None,
        comm: Communicator | None = None,
        *,
        synchronize: Literal["ddp", "optimizer"] = "ddp",
        optimizer_options: Mapping[str, Any] | None = None,
        stop_checkpoint: str | Path | None = None,
        on_failure: OnFailure = "raise",
        **options: Any,
    ) -> None:
        if "average" in options:
            warnings.warn("average= has become synchronize=", DeprecationWarning, stacklevel=2)
            synchronize = options.pop("average")
        if synchronize not in ("ddp", "optimizer"):
            raise ValueError(f"synchronize is {synchronize!r}: choose 'ddp' or 'optimizer'")
        if synchronize == "optimizer" and algorithm is None:
            raise ValueError("synchronize='optimizer' needs an algorithm, such as mpicomp.Relay()")
        if optimizer_options and synchronize == "ddp":
            raise ValueError("optimizer_options are of DistributedOptimizer: pass synchronize='optimizer' too")
        if comm is not None:
            open_communicator(comm, on_failure, algorithm)
        super().__init__(process_group_backend="mpicomp", cluster_environment=MPIEnvironment(), **options)
        self._open(comm, stop_checkpoint)
        self.algorithm, self.on_failure = algorithm, on_failure
        self._wraps_optimizers = synchronize == "optimizer"
        self.optimizer_options = dict(optimizer_options or {})
        self.state: Any = None
        self._restored_from: Path | None = None
        self._warned = False

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def configure_ddp(self) -> None:
        assert self.comm is not None
        if self._wraps_optimizers:
            repeat_after_deaths(partial(broadcast_parameters, self.model, self.comm))
            return
        if self.algorithm is not None and getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"{self.comm.here}: the gradient scaler of precision='16-mixed' lets gradients overflow, which the "
                "method refuses: use bf16, as in precision='bf16-mixed'"
            )
        super().configure_ddp()
        if self.algorithm is not None:  # Lightning's option for hooks works on GPUs only
            self.state, hook = ddp_hook(self.algorithm, self.comm, self.model)
            self.model.register_comm_hook(self.state, hook)

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if self._wraps_optimizers:
            assert self.algorithm is not None
            names = list(self.lightning_module.named_parameters())
            self.optimizers = [
                self._distributed(optimizer, with_seed(self.algorithm, place), names)
                for place, optimizer in enumerate(self.optimizers)
            ]

    def _distributed(
        self, optimizer: torch.optim.Optimizer, algorithm: Any, names: list[tuple[str, torch.Tensor]]
    ) -> Any:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in names if id(parameter) in own]
        return DistributedOptimizer(optimizer, algorithm, self.comm, named, **self.optimizer_options)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync(), ExitStack() as stack:
            for optimizer in self._wrapped:
                stack.enter_context(optimizer.no_sync())
            yield

    @property
    def _wrapped(self) -> list[Any]:
        return [one for one in self.optimizers if isinstance(one, DistributedOptimizer)]

    def synchronize(self) -> None:
        """Make the ranks' models equal after local steps, before they are evaluated or saved; collective."""
        for optimizer in self._wrapped:
            if optimizer.mode == "updates" and optimizer.models_differ:
                optimizer.synchronize()
        if self._wrapped and self.comm is not None:
            average_buffers(self.lightning_module, self.comm)

    @override
    def on_validation_start(self) -> None:
        self.synchronize()
        super().on_validation_start()

    @override
    def on_train_end(self) -> None:
        self.synchronize()
        super().on_train_end()

    # Exchanges of Lightning's own, among survivors --------------------------------------------------------------------

    @property
    @override
    def is_global_zero(self) -> bool:
        return self._survivors.rank == 0 if self._survivors else bool(super().is_global_zero)

    @override
    def barrier(self, *arguments: Any, **options: Any) -> None:
        if self._survivors:
            self._survivors.barrier()
        else:
            super().barrier(*arguments, **options)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return broadcast_from(self._survivors, obj, src) if self._survivors else super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._survivors and isinstance(tensor, torch.Tensor):
            _require_all_ranks(group)
            return reduce_rows(self._survivors, tensor, reduce_op)
        return super().reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._survivors:
            return self._survivors.allreduce(bool(decision), "min" if all else "max")
        return bool(super().reduce_boolean_decision(decision, all))

    @override
    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if self._survivors:
            _require_all_ranks(group)
            if sync_grads and tensor.requires_grad:
                raise ValueError(
                    "all_gather(sync_grads=True) has no gradient where on_failure='regroup': pass sync_grads=False, or "
                    "on_failure='raise'"
                )
            return gather_rows(self._survivors, tensor)
        return super().all_gather(tensor, group, sync_grads)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    @property
    def _owners(self) -> list[Any]:
        owners = self._wrapped or [self.state][: self.state is not None]
        return [one for one in owners if one.comm is self.comm]  # others are of a communicator that is closed

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.synchronize()
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().optimizer_state(optimizer)
        return wrapped_part(found) if self._wraps_optimizers else found

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._owners and "optimizer_states" in checkpoint:
            assert self.comm is not None
            save_beside(_local(filepath), self._owners, self.comm)
            return
        if self.algorithm is not None and checkpoint.get("optimizer_states") and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{filepath} is saved without residuals, since the Trainer has closed the communicator: save before "
                "fit() ends, or pass comm= to the strategy"
            )
        if self.is_global_zero and not _is_remote(filepath):
            remove_beside(_local(filepath))  # of an earlier checkpoint

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero and not _is_remote(filepath):
            remove_beside(_local(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._restored_from = None if _is_remote(checkpoint_path) else _local(checkpoint_path)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return found

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        path, wrapped = self._restored_from, self._wrapped
        assert self.comm is not None
        found = path is not None and bool(self._owners) and load_beside(path, self._owners, self.comm)
        if not found and self._owners:
            rank_zero_warn(
                f"the checkpoint {path or ''} has no files of ranks: the residuals of {self.algorithm} start at zero"
            )
        if not wrapped:
            super().load_optimizer_state_dict(checkpoint)
        elif not found:
            for optimizer, state in zip(wrapped, checkpoint["optimizer_states"], strict=True):
                optimizer.optimizer.load_state_dict(state)


class MPIShardedStrategy(_OverMPI, ModelParallelStrategy):
    """FSDP2 over MPI: Lightning's ModelParallelStrategy on the process group "mpicomp". Nothing is compressed.

    The module shards itself in ``configure_model``, over ``self.device_mesh["data_parallel"]``.

    Parameters
    ----------
    comm : Communicator, optional
        Makes and closes its own by default.
    stop_checkpoint : str or Path, optional
        As of `MPIStrategy`.
    **options
        Options of `lightning.pytorch.strategies.ModelParallelStrategy`. By default all ranks shard, and there is no
        tensor parallelism.
    """

    def __init__(
        self, comm: Communicator | None = None, *, stop_checkpoint: str | Path | None = None, **options: Any
    ) -> None:
        environment = MPIEnvironment()
        options.setdefault("data_parallel_size", environment.world_size())
        options.setdefault("tensor_parallel_size", 1)
        super().__init__(process_group_backend="mpicomp", **options)
        self.cluster_environment = environment
        self._open(comm, stop_checkpoint)
