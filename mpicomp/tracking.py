"""Curves of a training's communication, in TensorBoard, Weights & Biases, Lightning and the Trainer of Transformers.

All ranks call a tracker after a step, since an audit is a call of all; rank 0 writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from mpicomp.torch.non_copyable import NonCopyable

Write = Callable[[Mapping[str, float], int], object]
"""Function that takes values by name, and the step."""


def scalars(owner: NonCopyable, prefix: str = "mpicomp/") -> dict[str, float]:
    """Return traffic and diagnostics of an optimizer or a hook, by name; without those that are not known yet.

    Parameters
    ----------
    owner : DistributedOptimizer, OneBitAdam, DDPHookState or FSDPHook
    prefix : str
        Beginning of the names.

    Returns
    -------
    dict of float
        ``bytes_sent`` and ``seconds`` of the last synchronization, ``total_bytes_sent``, and the fields of
        `mpicomp.torch.watch.Diagnostics`. Bytes, seconds and residuals are those of this rank.

    Raises
    ------
    TypeError
        The owner is another object.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import DistributedOptimizer
    >>> from mpicomp.tracking import scalars
    >>> with mpicomp.Communicator() as comm:
    ...     weights = torch.nn.Parameter(torch.ones(3))
    ...     optimizer = DistributedOptimizer(torch.optim.SGD([weights], lr=0.1), mpicomp.Relay(16), comm)
    ...     for step in range(2):
    ...         weights.grad = torch.ones(3)
    ...         optimizer.step()
    ...         found = scalars(optimizer)
    >>> sorted(found)
    ['mpicomp/bytes_sent', 'mpicomp/seconds', 'mpicomp/total_bytes_sent']
    """
    _check_owner(owner)
    traffic, found = owner.traffic, owner.diagnostics()
    values = {
        "bytes_sent": float(traffic.last.bytes_sent),
        "seconds": traffic.last.seconds,
        "total_bytes_sent": float(traffic.total.bytes_sent),
        "update_norm": found.update_norm,
        "residual_norm": found.residual_norm,
        "residual_ratio": found.residual_ratio,
        "cosine": found.cosine,
        "clipped_share": found.clipped_share,
    }
    return {prefix + name: value for name, value in values.items() if not math.isnan(value)}


class Tracker:
    """Writes the scalars of an optimizer or a hook every few steps.

    Parameters
    ----------
    write : callable
        ``write(values, step)``, called on rank 0: a function of yours, `tensorboard` or `wandb`.
    every : int
        Steps from one record to the next.

    Raises
    ------
    TypeError, ValueError
        `write` is no function, or `every` no positive number.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import DistributedOptimizer
    >>> from mpicomp.tracking import Tracker
    >>> records = []
    >>> tracker = Tracker(lambda values, step: records.append((step, sorted(values)[0])), every=2)
    >>> with mpicomp.Communicator() as comm:
    ...     weights = torch.nn.Parameter(torch.ones(3))
    ...     optimizer = DistributedOptimizer(torch.optim.SGD([weights], lr=0.1), mpicomp.Dense(), comm)
    ...     for step in range(4):
    ...         weights.grad = torch.ones(3)
    ...         optimizer.step()
    ...         tracker.record(optimizer, step)
    >>> records
    [(0, 'mpicomp/bytes_sent'), (2, 'mpicomp/bytes_sent')]
    """

    def __init__(self, write: Write, every: int = 10) -> None:
        if not callable(write):
            raise TypeError(f"write is of type {type(write).__name__}: pass a function of values and step")
        self._write, self._every = write, _checked(every)

    def record(self, owner: NonCopyable, step: int) -> None:
        """Write the scalars if they are due; on all ranks, since an audit is a call of all.

        Parameters
        ----------
        owner : DistributedOptimizer, OneBitAdam, DDPHookState or FSDPHook
        step : int
            Number of the step.

        Raises
        ------
        TypeError
            The owner is another object.
        """
        _check_owner(owner)
        if step % self._every == 0:
            values = scalars(owner)
            if owner.comm.rank == 0:
                self._write(values, step)


def tensorboard(writer: Any = None, **options: Any) -> Write:
    """Return a function that writes to TensorBoard.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter, optional
        None makes one at the first record, hence on rank 0 alone.
    **options
        Options of the new SummaryWriter, such as ``log_dir``.

    Raises
    ------
    ImportError
        TensorBoard is not installed, and no writer was passed.
    """
    if writer is None:
        module = _required("torch.utils.tensorboard", "TensorBoard", "tensorboard")
    made: list[Any] = [] if writer is None else [writer]

    def write(values: Mapping[str, float], step: int) -> None:
        if not made:
            made.append(module.SummaryWriter(**options))
        for name, value in values.items():
            made[0].add_scalar(name, value, step)

    return write


def wandb(run: Any = None) -> Write:
    """Return a function that writes to a run of Weights & Biases, over the axis ``mpicomp/step``.

    Parameters
    ----------
    run : wandb.Run, optional
        None: the current one, that of ``wandb.init`` on rank 0.

    Raises
    ------
    ImportError
        The package is not installed, and no run was passed.
    """
    module = _required("wandb", "Weights & Biases", "wandb") if run is None else None
    axes: list[Any] = []  # runs whose curves have an axis of their own

    def write(values: Mapping[str, float], step: int) -> None:
        current = run if module is None else module.run
        if current is None:
            raise RuntimeError("Weights & Biases has no run: call wandb.init on rank 0 before the first record")
        if current not in axes:
            current.define_metric("mpicomp/*", step_metric="mpicomp/step")
            axes.append(current)
        # A run drops rows of steps behind its own, which each `log` without a step moves on.
        current.log({**values, "mpicomp/step": step}, step=max(step, current.step))

    return write


def lightning_callback(every: int = 50) -> Any:
    """Return a callback for a Lightning Trainer with `mpicomp.lightning.MPIStrategy`, which writes to its loggers.

    Parameters
    ----------
    every : int
        Steps from one record to the next.

    Raises
    ------
    ImportError
        Lightning is not installed.
    ValueError
        `every` is no positive number.
    """
    every, base = _checked(every), _required("lightning.pytorch", "PyTorch Lightning", "lightning").Callback

    recorded = [0]  # step; the batches of an accumulated gradient end at the same one

    def on_train_batch_end(self: object, trainer: Any, *_: object, **__: object) -> None:
        step = trainer.global_step
        if step % every or step in (0, *recorded):
            return
        recorded[0] = step
        owners = [trainer.strategy.state, *trainer.strategy.optimizers]
        for place, owner in enumerate(one for one in owners if isinstance(one, NonCopyable)):
            values = scalars(owner, f"mpicomp/{place}/" if place else "mpicomp/")
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(values, step=step)

    return type("LightningTracker", (base,), {"on_train_batch_end": on_train_batch_end})()


def trainer_callback(trainer: Any, callback: Any, every: int = 50) -> Any:
    """Return a callback for a Trainer of Transformers, which adds to the Trainer's logs: ``add_callback`` takes it.

    Parameters
    ----------
    trainer : transformers.Trainer
    callback : mpicomp.transformers.MPICallback
        The one that is attached to the Trainer.
    every : int
        Steps from one record to the next.

    Raises
    ------
    ImportError
        Transformers is not installed.
    ValueError
        `every` is no positive number.
    """
    every, base = _checked(every), _required("transformers", "Transformers", "transformers[torch]").TrainerCallback

    def on_step_end(self: object, args: object, state: Any, control: Any, **_: object) -> None:
        if callback.state is not None and state.global_step % every == 0:
            should_log = control.should_log
            trainer.log(scalars(callback.state))
            control.should_log = should_log  # any log clears it, and the loss of this step would not be logged

    return type("TrainerTracker", (base,), {"on_step_end": on_step_end})()


def _check_owner(owner: object) -> None:
    if not isinstance(owner, NonCopyable):
        raise TypeError(
            f"{type(owner).__name__} has no traffic: pass an optimizer of mpicomp, such as DistributedOptimizer or "
            "OneBitAdam, the state of ddp_hook, or the hook of fsdp_hook"
        )


def _checked(every: int) -> int:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}; choose a whole number, 1 or more")
    return every


def _required(module: str, name: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this tracker needs {name} ({error}): pip install {package}") from error
