"""Checkpoints of a pipeline that all stages share, also after the death of a rank.

**The commit rule.** A step is committed on all survivors or on none. A rank that has made its part of a step passes an
exchange with all others before it changes the messages that it keeps, and before it drops its copy of the state before
the step. If a survivor has passed the exchange, all ranks had completed the step, and all survivors write the state
after it. Otherwise all of them write the state before it.

A rank that has died left no state. Its model and optimizer are those of the same stage in another replica, and its
messages those that its neighbours keep at the other ends of its cuts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from mpi4py import MPI

from collectives.consistency.descriptions import gather_objects
from collectives.errors import CollectiveError, CollectiveTimeout, DamagedMessage, PeerFailure
from collectives.quoting import list_ranks
from collectives.recovery.fault_tolerance import (
    LONGEST_NOTICE_S,
    agree,
    describe_failed,
    failed_ranks,
    is_revoked,
    is_tolerant,
    may_repeat,
    reports_death,
    revoke,
    with_survivors,
)
from mpicomp.codecs.options import whole
from mpicomp.pipeline.agreement import PipelineError, failure_text
from mpicomp.pipeline.stage import PipelineStage
from mpicomp.torch.state.schema import STATE_KEY, State
from mpicomp.torch.state.step_folder import (
    Gather,
    Place,
    Stateful,
    checkpoints,
    newest_of_all,
    on_all_ranks,
    read_manifest,
    read_state,
    step_of,
    write,
)


class StageLost(PeerFailure):
    """A rank of a pipeline has died, and all survivors end with this error, which names the checkpoint to go on from.

    Attributes
    ----------
    ranks : tuple of int
        The dead ranks.
    places : tuple of (int, int)
        Their replicas and stages.
    step : int
        Number of steps that the checkpoint has; 0 without a checkpoint.
    path : Path or None
        The checkpoint.

    Examples
    --------
    >>> from pathlib import Path
    >>> from mpicomp.pipeline import StageLost
    >>> try:
    ...     raise StageLost("rank 3 died", (3,), ((1, 1),), 12, Path("saved/step-00000012"))
    ... except StageLost as error:
    ...     print(error, error.path.name)
    rank 3 died step-00000012
    """

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        places: Sequence[Place] = (),
        step: int = 0,
        path: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks, self.places, self.step, self.path = tuple(ranks), tuple(places), step, path


class StageCheckpoints:
    """Checkpoints of all stages of a pipeline after the same step, on a schedule and after the death of a rank.

    Use it in a ``with`` block around the training, and `step` around each step. Where pipelines run side by side and a
    rank dies, the survivors write the state after the last step that all of them have completed, and raise `StageLost`.
    The same job goes on from there. Without replicas the state of the dead stage is gone, and the error names the last
    checkpoint on the schedule.

    Parameters
    ----------
    folder : str or PathLike
        On a file system that all ranks see; made if it is missing. The two newest checkpoints are kept.
    stage : PipelineStage
        This rank's. Its communicator and ``everyone`` determine the replicas; neither has ``on_failure="regroup"``.
    parts : dict of str to objects with ``state_dict`` and ``load_state_dict``
        Module, optimizer, and all else that a step changes, by name; the same names on all ranks.
    every : int
        Number of steps between checkpoints.

    Attributes
    ----------
    steps : int
        Number of steps that are committed.

    Raises
    ------
    PipelineError
        An argument cannot be used (a ValueError of one rank), or the folder cannot be made; on all ranks.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.pipeline import PipelineStage, StageCheckpoints
    >>> def train(comm, folder, last):
    ...     module = torch.nn.Linear(4, 4)
    ...     stage = PipelineStage(module, comm, micro_batches=2, loss=torch.nn.functional.mse_loss)
    ...     optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ...     parts = {"module": module, "optimizer": optimizer}
    ...     with StageCheckpoints(folder, stage, parts, every=2) as checkpoints:
    ...         first = checkpoints.load()
    ...         for number in range(first, last):
    ...             with checkpoints.step():
    ...                 optimizer.zero_grad()
    ...                 stage.step(torch.ones(8, 4), -torch.ones(8, 4))
    ...                 optimizer.step()
    ...     return first, checkpoints.steps
    >>> folder = mkdtemp()
    >>> mpicomp.run_local(2, lambda comm: train(comm, folder, last=3))
    [(0, 3), (0, 3)]
    >>> mpicomp.run_local(2, lambda comm: train(comm, folder, last=5))
    [(3, 5), (3, 5)]
    """

    def __init__(
        self, folder: str | PathLike[str], stage: PipelineStage, parts: Mapping[str, Stateful], *, every: int = 100
    ) -> None:
        self._stage, self._every = stage, every
        self._comm = stage.comm if stage.everyone is None else stage.everyone
        self.steps = 0
        self._before: State | None = None  # state before the step that this rank makes now
        self._written: set[int] = set()  # steps of the checkpoints that this object has written or loaded
        self._is_in_step = self._is_loaded = False
        self._is_mixed = False  # some ranks have failed in a step that others have made

        def check() -> None:
            if not whole(every, 1):
                raise ValueError(f"every must be a number of steps, not {every!r:.80}")
            if any(one.recovery is not None for one in (self._comm, stage.comm)):
                raise ValueError(
                    "the communicator goes on with the survivors after a death, and StageCheckpoints needs all ranks "
                    'to end together: make the Communicator with on_failure="raise", the default'
                )
            self._folder, self._parts = Path(folder), dict(parts)
            self._folder.mkdir(parents=True, exist_ok=True)

        on_all_ranks(self._comm.allgather_object, self._comm.here, PipelineError, check)
        everyones = self._comm.allgather_object((stage.pipeline, stage.stage, sorted(self._parts)))
        pipelines = sorted({pipeline for pipeline, _, _ in everyones})
        self._places = [(pipelines.index(pipeline), number) for pipeline, number, _ in everyones]
        self._place = self._places[self._comm.rank]
        self._grid = len(pipelines), stage.stages
        names = {rank: theirs for rank, (_, _, theirs) in enumerate(everyones)}
        if len(set(map(tuple, names.values()))) > 1:
            raise PipelineError(f"{self._comm.here}: the ranks name different parts, name the same on all: {names}")

    # Steps -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Commit the step that the ``with`` block makes on all ranks, or on none; collective.

        The block calls ``stage.step`` once, and steps of the optimizer and of all other parts. After each `every` steps
        a checkpoint is written.

        Raises
        ------
        PipelineError
            `load` was not called and the folder has checkpoints, or a rank cannot write; on all ranks. A rank has
            failed in the block after ``stage.step``, or is at another step; on all that raise no other error. Call
            `load` to go on.
        CollectiveTimeout, PeerFailure
            A rank does not answer.
        """
        if not self._is_loaded:
            self._require_new()
        # Without replicas the dead stage's state is lost, so that no copy of the others is needed.
        self._before = copy.deepcopy(self._state_of_parts()) if self._grid[0] > 1 else None
        self._is_in_step = True
        self._stage.hold_messages()
        try:
            try:
                yield
            except Exception as error:
                # Once the passes are over, ranks without an error wait in the exchange. After a timeout or a death of
                # others they do not come.
                if self._stage.holds_step and not isinstance(error, CollectiveTimeout | PeerFailure):
                    self._report_failure(error)
                raise
            self._agree_on_step(None)
        except BaseException as error:
            if not self._is_due_to_death(error):  # after a death the survivors settle the step
                self._leave_step(commits=False)
            raise
        self._leave_step(commits=True)
        if self.steps % self._every == 0:
            self.save()

    def _agree_on_step(self, error: Exception | None) -> None:
        """Exchange with all ranks whether they have made the step; PipelineError if one has not; collective."""
        everyones = self._comm.allgather(np.array([[self.steps, error is not None]], np.int64)).tolist()
        failed = any(has_failed for _, has_failed in everyones)
        steps = [number for number, _ in everyones]
        if not failed and len(set(steps)) == 1:
            return
        self._is_loaded, self._is_mixed = False, True
        cure = "no rank commits it, and parts may be ahead of others: call load() on all ranks, or start the job again"
        if not failed:
            raise PipelineError(f"{self._comm.here}: the ranks end different steps ({steps}); {cure}")
        texts = self._comm.allgather_object(failure_text(error))
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        raise PipelineError(
            f"{self._comm.here}: rank {rank} failed after the passes of a step ({text}); {cure}"
        ) from error

    def _report_failure(self, error: Exception) -> None:
        """Have the other ranks raise PipelineError at the end of the step; this one raises its own error."""
        try:
            self._agree_on_step(error)
        except PipelineError:
            pass
        except CollectiveError as other:
            if self._is_due_to_death(other):
                raise other from error

    def _leave_step(self, commits: bool) -> None:
        self._stage.settle_messages(commits)
        self.steps += commits
        self._is_in_step, self._before = False, None

    def save(self) -> Path:
        """Write a checkpoint now, unless there is one of this step; collective.

        Returns
        -------
        Path
            The checkpoint.

        Raises
        ------
        PipelineError
            A rank cannot write or is within `step`, or `load` was not called and the folder has checkpoints; on all
            ranks. Earlier checkpoints are untouched.
        """

        def check() -> None:
            if self._is_in_step:
                raise RuntimeError("save() within the block of step(): call it after the block, which commits the step")

        on_all_ranks(self._comm.allgather_object, self._comm.here, PipelineError, check)
        if not self._is_loaded:
            self._require_new()
        return self._write(self._comm.allgather_object, None, ())

    def load(self) -> int:
        """Go on from the newest checkpoint, if there is one; collective.

        Ranks that were dead when it was written begin with the model and the optimizer of the same stage in another
        replica, and with the messages that their neighbours have kept. Residuals of the stage's optimizers are
        distributed as by `mpicomp.torch.redistribute_states`. PyTorch's random state of the CPU is restored, too.

        Returns
        -------
        int
            Number of steps that it has; 0 without a checkpoint.

        Raises
        ------
        PipelineError
            It is of another grid, or damaged, or the ranks see different folders; on all ranks.
        """
        self._is_loaded = False  # until all of the state is loaded
        newest = newest_of_all(self._comm.allgather_object, self._comm.here, PipelineError, self._folder)
        if newest is None:
            self._require_unmixed()
            self._is_loaded = True
            return 0

        def read() -> tuple[State, list[str]]:
            _, lost = read_manifest(newest, self._grid)
            unpaired = [side for side, other in self._neighbours() if {self._place, other} <= set(lost)]
            return self._own_state(newest, lost), unpaired

        state, unpaired = on_all_ranks(self._comm.allgather_object, self._comm.here, PipelineError, read)
        for name in sorted(self._parts):  # in one order on all ranks: some load together
            load = partial(self._parts[name].load_state_dict, state["parts"][name])
            on_all_ranks(self._comm.allgather_object, self._comm.here, PipelineError, load)
        self._stage.load_state_dict(state["stage"])
        self._stage.forget_cuts(unpaired)
        torch.set_rng_state(state["random"])
        self.steps = int(state["step"])
        self._written.add(step_of(newest))
        self._is_loaded, self._is_mixed = True, False
        return self.steps

    def _require_unmixed(self) -> None:
        if self._is_mixed:  # equal on all ranks
            raise PipelineError(
                f"{self._comm.here}: a step has failed on some ranks only, and {self._folder} has no checkpoint to go "
                "on from: start the job again"
            )

    def _newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, 0 without one; None where the folder cannot be read."""
        try:
            return max(map(step_of, checkpoints(self._folder)), default=0)
        except OSError:  # not raised here: the other ranks wait for the answer
            return None

    def _require_new(self) -> None:
        def check() -> None:
            if checkpoints(self._folder):
                raise ValueError(
                    f"{self._folder} has checkpoints, and the newest one is not loaded: call load() before the next "
                    "step, or name another folder"
                )

        on_all_ranks(self._comm.allgather_object, self._comm.here, PipelineError, check)
        self._require_unmixed()
        self._is_loaded = True

    # States ----------------------------------------------------------------------------------------------------------

    def _state_of_parts(self) -> State:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"parts": parts, "random": torch.get_rng_state()}

    def _write(self, gather: Gather, before: State | None, lost: Sequence[Place]) -> Path:
        """Write a checkpoint of the parts' state before the step, or of that which they have now."""

        def make_state() -> State:
            parts = self._state_of_parts() if before is None else before
            return {**parts, "step": self.steps, "stage": self._stage.state_dict()}

        here, place = self._comm.here, self._place
        return write(
            gather, here, PipelineError, self._folder, self.steps, place, make_state, self._grid, lost, self._written
        )

    def _neighbours(self) -> list[tuple[str, Place]]:
        """Return the sides of this stage that have cuts, and the place at the other end of each."""
        replica, stage = self._place
        sides = [("before", (replica, stage - 1)), ("after", (replica, stage + 1))]
        return [(side, other) for side, other in sides if 0 <= other[1] < self._grid[1]]

    def _own_state(self, path: Path, lost: Sequence[Place]) -> State:
        """Return the state with which this rank goes on, from those of the ranks that were alive."""
        stage = self._place[1]
        alive = [(one, stage) for one in range(self._grid[0]) if (one, stage) not in lost]
        source = self._place if self._place in alive else alive[0]
        state = read_state(path, source)
        if set(state["parts"]) != set(self._parts):
            raise ValueError(f"{path} has the parts {sorted(state['parts'])}, not {sorted(self._parts)}: name the same")
        if len(alive) < self._grid[0]:
            state["parts"] = self._redistribute([read_state(path, one)["parts"] for one in alive], state["parts"])
        if source == self._place:
            return state
        codings = state["stage"]["codings"]  # of another replica, until a neighbour has those of this one
        for side, other in self._neighbours():
            if other not in lost:
                end = {"before": "after", "after": "before"}[side]
                for key in [key for key in codings if key.endswith(f" {side}")]:
                    del codings[key]
                for key, one in read_state(path, other)["stage"]["codings"].items():
                    if key.endswith(f" {end}"):
                        codings[f"{key.removesuffix(end)}{side}"] = one
        return state

    def _redistribute(self, everyones: Sequence[State], own: State) -> State:
        """Return the parts' states, where those of this library's optimizers are divided among all replicas again."""
        found = dict(own)
        for name, state in own.items():
            if isinstance(state, dict) and isinstance(state.get(STATE_KEY), dict) and "ranks" in state[STATE_KEY]:
                from mpicomp.torch import redistribute_states

                states = [
                    {**one[name], STATE_KEY: {**one[name][STATE_KEY], "ranks": len(everyones), "rank": rank}}
                    for rank, one in enumerate(everyones)
                ]
                found[name] = redistribute_states(states, self._grid[0])[self._place[0]]
        return found

    # Deaths ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                if self.steps:
                    self.save()  # all ranks are here, and a later death loses nothing
            except CollectiveError as caught:
                error = caught
        if error is None:
            return
        if self._is_due_to_death(error):
            raise self._settle_with_survivors() from error
        if kind is None:
            raise error

    def _is_due_to_death(self, error: BaseException) -> bool:
        comm = self._comm.missing.comm
        if not isinstance(error, CollectiveError) or not is_tolerant(comm):
            return False
        if not (reports_death(error, comm) or is_revoked(comm) or failed_ranks(comm)):
            return False
        # A rank that ends by an uncaught exception revokes communicators too. MPI does not report it as dead, and would
        # wait for it in Shrink.
        return bool(describe_failed(comm, LONGEST_NOTICE_S))

    def _settle_with_survivors(self) -> StageLost:
        """Write a checkpoint with the survivors if all stages are left; return the error to raise; on all survivors."""
        comm, here = self._comm, self._comm.here
        old, group = comm.missing.comm, comm.missing.comm.Get_group()
        text = f"{here}: a rank has died, and not all survivors come to write a checkpoint"
        damages: list[str] = []
        while True:
            revoke(old)
            new = with_survivors(old.Shrink, comm.arrival_timeout, lambda: text)
            new.Set_errhandler(MPI.ERRORS_RETURN)
            found: StageLost | None = None
            try:
                alive = MPI.Group.Translate_ranks(new.Get_group(), None, group)
                gather = partial(gather_objects, comm.options.checked(new), timeout_s=comm.arrival_timeout)
                found = self._write_rest(gather, alive)
            except (MPI.Exception, PeerFailure, DamagedMessage) as error:
                if not may_repeat(error, new, damages):
                    raise
                revoke(new)  # ranks may wait for messages of this one
            if with_survivors(partial(agree, new, found is not None), comm.arrival_timeout, lambda: text):
                assert found is not None  # as this rank has agreed
                return found
            old = new

    def _write_rest(self, gather: Gather, alive: Sequence[int]) -> StageLost:
        reached = max(gather(self.steps))
        if self._is_in_step and self.steps < reached:  # a survivor has passed the exchange at the end of this step
            self._leave_step(commits=True)
        self._stage.settle_messages(False)
        dead = [rank for rank in range(self._comm.size) if rank not in alive]
        places = [self._places[rank] for rank in dead]
        left = {self._places[rank][1] for rank in alive}
        gone = [stage for stage in range(self._grid[1]) if stage not in left]
        during = f"rank {', '.join(map(str, dead))}" if len(dead) == 1 else list_ranks(dead)
        stages = " and ".join(f"stage {stage} of replica {replica}" for replica, stage in places)
        text = f"{self._comm.here}: {f'{during}, {stages},' if dead else 'a rank of another pipeline'} died after step "
        text += str(self.steps)
        # Without replicas there is no copy from before the step. The dead rank may be of another pipeline.
        is_within = self._is_in_step and self._before is None
        ready = gather((self._is_loaded, not is_within))
        if not all(is_loaded for is_loaded, _ in ready):
            text += "; not all ranks had loaded the state to go on from"
        elif gone:
            text += f"; no other replica has the state of stage {', '.join(map(str, gone))}"
        elif not all(is_between for _, is_between in ready):
            text += "; ranks are within the next step, and a single pipeline has no copy of the state before it"
        else:
            try:
                path = self._write(gather, self._before, places)
                cure = f"all stages are saved after this step in {path}: start the same job again, which loads it"
                return StageLost(f"{text}; {cure}", dead, places, self.steps, path)
            except PipelineError as error:
                text += f"; the checkpoint of this step could not be written ({error})"
        found = [one for one in gather(self._newest_step()) if one is not None]
        newest = max(found, default=0)
        if not newest:
            cure = "there is no checkpoint: start again from scratch" if found else f"{self._folder} cannot be read"
            return StageLost(f"{text}, and {cure}", dead, places)
        path = self._folder / f"step-{newest:08d}"
        cure = f"the newest checkpoint of all stages is {path}: start the same job again, which loads it"
        return StageLost(f"{text}; {cure}", dead, places, newest, path)
