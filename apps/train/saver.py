"""When a run saves its checkpoints, and how it resumes."""

from __future__ import annotations

import argparse
from pathlib import Path

from apps.train import checkpoint
from apps.train.agreement import raise_on_all_ranks
from apps.train.options import NODES, differing, identity
from apps.train.redistribute import redistribute
from apps.train.training import Training
from collectives import Communicator
from collectives.quoting import shown
from mpicomp.torch import require_same


class Saver:
    """Writes a checkpoint whenever one is due, and one more when a stop is requested, which ends the run.

    Making it is collective.

    Attributes
    ----------
    last_step
        Step of the newest checkpoint, or of the start.
    """

    def __init__(self, options: argparse.Namespace, comm: Communicator, training: Training) -> None:
        self._folder: Path = options.checkpoint
        self._every, self._unit = options.checkpoint_every
        self._options = options
        self._comm, self._training = comm, training
        self.last_step = training.step
        comm.stop_requested()  # installs the handlers: a signal during the first step must not end the rank

    def after_step(self) -> bool:
        """Save if a checkpoint is due or any rank is to stop; collective. Returns whether to stop."""
        stop = self._comm.stop_requested()
        due = self._unit == "steps" and self._training.step - self.last_step >= self._every
        if stop or due:
            self._save()
        return stop

    def after_epoch(self) -> None:
        """Save if as many epochs have passed as the options request; collective."""
        if self._unit == "epochs" and self._training.epoch % self._every == 0:
            self._save()

    def _save(self) -> None:
        run = self._training
        if not run.optimizer.models_differ:
            require_same(run.model, self._comm)  # a checkpoint of models that differ would hide the error for good
        while not self._is_saved():  # a rank has died, so that the others have new ranks and states
            pass
        self.last_step = run.step

    def _is_saved(self) -> bool:
        comm, run = self._comm, self._training
        options = identity(self._options, comm.layout.sizes)
        path = checkpoint.save(self._folder, comm, run.step, options, run.model.state_dict(), run.state_dict())
        return path is not None


def resume(options: argparse.Namespace, comm: Communicator, training: Training) -> str | None:
    """Restore the newest checkpoint into `training`; returns whose it is, or None if there is none yet; collective.

    If it is damaged or of another program, or if a run with other options wrote it, every rank raises JobError.
    """
    now = identity(options, comm.layout.sizes)
    found = checkpoint.load(options.checkpoint, comm, redistribute, lambda before: before.get(NODES) == now.get(NODES))
    if found is None:
        return None
    with raise_on_all_ranks(comm):
        before = found.options
        changed = differing(before, now, other_ranks=found.moved)
        if changed:
            changes = ", ".join(f"{key} was {shown(before.get(key))} and is {shown(now.get(key))}" for key in changed)
            raise ValueError(f"{found.path} belongs to a run with other options: {changes}; use the same")
    for part in training.restoring(found.model, found.state):
        with raise_on_all_ranks(comm):
            try:
                part()
            except Exception as error:  # a state of another program may have any form
                raise ValueError(
                    f"{found.path} holds no state of this run ({error!r}); remove the folder to resume from an earlier "
                    "one"
                ) from error
    if not found.moved:
        return f"{found.path}"
    nodes = found.options.get(NODES)
    on_nodes = f" on {len(nodes)} node{'s'[: len(nodes) > 1]}" if nodes else ""
    return f"{found.path}, which {found.ranks} ranks{on_nodes} wrote"


def require_unused(options: argparse.Namespace, comm: Communicator) -> None:
    """Raise JobError on every rank if the folder holds the checkpoints of an earlier run, which would get mixed up."""
    with raise_on_all_ranks(comm):
        if checkpoint.checkpoints(options.checkpoint):
            raise ValueError(
                f"{options.checkpoint} holds checkpoints of an earlier run; add --resume or name another folder"
            )
