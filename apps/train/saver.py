"""When a run saves itself, and that it stops when asked to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from apps.train import checkpoint
from apps.train.agreement import any_rank, together
from apps.train.options import identity
from apps.train.preemption import StopRequest
from apps.train.training import Training
from collectives import Communicator


class Saver:
    """Writes a run's checkpoints on its schedule, and one more when a signal ends it.

    Parameters
    ----------
    options
        Of the run; ``checkpoint`` names the folder.
    comm
        Communicator of the run.
    training
        What is saved.
    stop
        Entered already; raised flags become a checkpoint and an end.
    """

    def __init__(self, options: argparse.Namespace, comm: Communicator, training: Training, stop: StopRequest) -> None:
        self._folder: Path = options.checkpoint
        self._every, self._unit = options.checkpoint_every
        self._header = {"options": identity(options)}
        self._comm, self._training, self._stop = comm, training, stop
        self._last_step = training.step

    def after_step(self) -> bool:
        """Save if it is time or a stop is asked for; collective. Returns whether to stop."""
        stop = any_rank(self._comm, self._stop.requested)
        due = self._unit == "steps" and self._training.step - self._last_step >= self._every
        if stop or due:
            self._save()
        return stop

    def after_epoch(self) -> None:
        """Save if as many epochs have passed as the options say; collective."""
        if self._unit == "epochs" and self._training.epoch % self._every == 0:
            self._save()

    def _save(self) -> None:
        training = self._training
        checkpoint.save(
            self._folder,
            self._comm,
            training.step,
            self._header,
            training.model.state_dict(),
            training.state_dict(),
        )
        self._last_step = training.step


def resume(options: argparse.Namespace, comm: Communicator, training: Training) -> Path | None:
    """Restore the newest checkpoint into `training`; collective. Returns where it was, None if there is none yet.

    Raises
    ------
    JobError
        The checkpoint is damaged, or was written by another number of ranks or with other options; on every rank.
    """
    found = checkpoint.load(options.checkpoint, comm)
    if found is None:
        return None
    with together(comm):
        theirs: dict[str, Any] = found.header["options"]
        ours = identity(options)
        differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        if differing:
            changes = ", ".join(f"{key} was {theirs.get(key)!r} and is {ours.get(key)!r}" for key in differing)
            raise ValueError(f"{found.path} belongs to a run with other options: {changes}; use the same")
        training.load_state_dict(found.model, found.state)
    return found.path


def require_unused(options: argparse.Namespace, comm: Communicator) -> None:
    """Raise JobError on every rank if the checkpoint folder holds an earlier run's: two runs' would be mixed up."""
    with together(comm):
        if checkpoint.exist(options.checkpoint):
            raise ValueError(
                f"{options.checkpoint} holds checkpoints of an earlier run; add --resume or name another folder"
            )
