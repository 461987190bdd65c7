"""The "updates" mode: each rank's optimizer moves its own copy of the model, then the ranks average the moves.

From the common model x, H optimizer steps lead to x_local. The synchronization after them makes
x <- x - aggregate(x - x_local) and x_local <- x. At the first step after a synchronization the parameters are given a
copy of x in other memory (they step aside), and the optimizer moves that; x stays where it was, and they return to it.

With overlap the last local step is made bucket by bucket while backward runs: as soon as backward has brought a
bucket's gradients, the optimizer moves its parameters, and their move begins to be averaged.

A synchronization that fails leaves the common model on every rank, and so does the first step after one. The common
model has then moved by the means of the reducers that did not fail: of those before the one that failed, or with
overlap of all others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from collectives.consistency.call_check import fingerprint
from collectives.errors import CollectiveError, marked
from mpicomp.torch.bucket_queue import InOrder
from mpicomp.torch.bucket_reducers import BucketReducer, BucketReducers
from mpicomp.torch.devices import all_finite
from mpicomp.torch.optimizer.gradient_hooks import Arrivals, listen
from mpicomp.torch.optimizer.step_agreement import StepAgreement
from mpicomp.torch.parameters import MasterWeights
from mpicomp.torch.state.schema import require_counters, require_like


class LocalUpdates:
    """Counts local steps, and synchronizes after `local_steps` of them.

    Parameters
    ----------
    optimizer
        The wrapped one.
    reducers, comm, agreement, masters
        The buckets, the communicator of the ranks that average them, the comparison that travels with one bucket, and
        the float32 copies of 16-bit parameters.
    local_steps
        H.
    skip_nonfinite
        Whether no rank makes a step if the gradients of one of them hold NaN or infinity: momentum would keep them.
    overlap
        Whether the last local step is made during backward.
    passes
        How often backward adds to each gradient before a step.

    Attributes
    ----------
    steps
        Optimizer steps made since the last synchronization.
    models_compared
        The ranks have compared their models, in a step. Buckets begin during backward only from then on.
    """

    to_be_averaged = averaged = False
    """No gradients are averaged."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reducers: BucketReducers,
        comm: Communicator,
        agreement: StepAgreement,
        masters: MasterWeights,
        local_steps: int,
        skip_nonfinite: bool,
        overlap: bool,
        passes: int,
    ) -> None:
        self.reducers = reducers
        self.synchronizations = self.steps = 0
        self.models_compared = False
        self.arrivals = Arrivals([member.name for member in reducers.members], passes)
        self._optimizer, self._comm, self._masters = optimizer, comm, masters
        self._local_steps, self._skip_nonfinite, self._overlap = local_steps, skip_nonfinite, overlap
        self._checked = self._skipping = self._warned = self._scaled = self._in_backward = False
        self._aside: list[list[Tensor]] = []  # memory beside the common model, of each bucket, like its parameters
        self._common: dict[Tensor, Tensor] = {}  # the common model, by the parameters that are aside
        self.agreement, agreement.common = agreement, self._common
        self._queue = InOrder(reducers, comm, self._fill, agreement)
        listen(self, [masters.original(member.parameter) for member in reducers.members])

    @property
    def models_differ(self) -> bool:
        """Whether local steps were made since the last synchronization."""
        return self.steps > 0

    @property
    def can_refuse(self) -> bool:
        """Flag: a refusal of the step to come reaches the other ranks in that step.

        They make local steps without a call, and with overlap may have begun the next synchronization meanwhile.
        """
        return self.steps + 1 >= self._local_steps

    @property
    def in_flight(self) -> bool:
        """Whether parameters have moved and been sent during backward, or may have been on another rank."""
        return self._moves_in_backward and self.arrivals.any_complete

    @property
    def _moves_in_backward(self) -> bool:
        early = self._overlap and self.models_compared and not self.arrivals.overtaken
        return early and len(self.reducers) > 1 and self.steps + 1 >= self._local_steps

    def gradient_came(self, position: int) -> None:
        """Move the parameters of the buckets that this gradient completes; called by hooks during backward."""
        self._scaled = False  # if the scaler has skipped the step, which this is not told
        moves = self._moves_in_backward
        if self.arrivals.complete(position, sent=moves) and moves:
            self._in_backward = True
            try:
                self._queue.complete(position)
            finally:
                self._in_backward = False

    @torch.no_grad()
    def begin_step(self) -> None:
        """Let the parameters step aside if this is the first step after a synchronization."""
        self.reducers.lay_out(self.arrivals.order)
        if not self._scaled:
            self._checked = self._skipping = False
        if self.steps == 0:
            self._masters.refresh()
            for reducer in self.reducers[self._queue.begun :]:
                self._step_aside(reducer)

    def before_evaluation(self) -> None:
        """Show a closure where the optimizer has moved the masters since it was last called."""
        self._masters.publish()

    def before_scaler(self) -> None:
        """Agree on infinities ahead of the search for them in the gradients, so that all ranks find some or none."""
        if self._scaled:
            return
        if self._overlap:
            raise RuntimeError(
                f'{self._comm.here}: a GradScaler cannot be combined with overlap under "updates", where backward has '
                "moved the parameters by scaled gradients; pass overlap=False"
            )
        self.reducers.lay_out(self.arrivals.order)
        self._masters.take_gradients()
        self._scaled = self._checked = True
        self._skipping = self._any_nonfinite()
        if self._skipping:
            for gradient in self._gradients():
                (gradient._values() if gradient.is_sparse else gradient).fill_(float("nan"))

    def take_gradients(self) -> None:
        """Hand the gradients, which are there now, to the masters; drop them all if the step is to be skipped.

        Raises
        ------
        RuntimeError
            A gradient of a 16-bit parameter was changed after a GradScaler had unscaled its master's.
        """
        if not self._scaled:
            self._masters.take_gradients()
        elif self._masters.gradients_changed:
            error = RuntimeError(
                f"{self._comm.here}: gradients of 16-bit parameters were changed between scaler.unscale_(optimizer) "
                "and step(), which uses float32 copies of them: clip the optimizer's parameters, "
                "[p for group in optimizer.param_groups for p in group['params']], instead of the model's"
            )
            self._comm.reject(error, "an optimizer step")
        # Once a step: a closure may be called more often on one rank than on another.
        if self._skip_nonfinite and not self._checked:
            self._checked = True
            self._skipping = self._any_nonfinite(warn=True)
        if self._skipping:
            self.drop_gradients(set_to_none=True)
            for reducer in self.reducers:
                for parameter in reducer.parameters:
                    parameter.grad = None  # which optimizers pass over

    def stepping(self) -> AbstractContextManager[None]:
        """What surrounds the optimizer's step: it leaves out the parameters that have moved during backward."""
        if not self._queue.begun:
            return nullcontext()
        return _only(self._optimizer, (p for reducer in self.reducers[self._queue.begun :] for p in reducer.parameters))

    def end_step(self) -> None:
        """Count the step, unless it was skipped, and synchronize if it was the last local one."""
        self.arrivals.restart()
        self._scaled = False
        if self._skipping:
            self.fail_step()
            return
        self.steps += 1
        if self.steps >= self._local_steps:  # more, where a state saved with more local steps was loaded
            self.synchronize()
        else:
            self._masters.publish()

    def fail_step(self) -> None:
        """Be where the step began: the first after a synchronization leaves the common model."""
        if self.steps == 0:
            self._return(tuple(self._common))

    @torch.no_grad()
    def refuse(self, error: Exception) -> NoReturn:
        """Raise `error` here, and CollectiveMismatch on the ranks that make the step; all have the common model then.

        Local steps are kept where all ranks refuse for the same reason in a step that does not synchronize.
        """
        self.arrivals.restart()
        if self._moves_in_backward:  # on all ranks or on none: it does not depend on the gradients that have come here
            try:
                self._queue.finish(refusal=error)
            finally:
                self._abandon()
        reason = f"rejects an optimizer step: {error}"
        text = reason.replace(self._comm.here, "")
        try:
            self._comm.agree(fingerprint(text), lambda: f"rank {self._comm.rank} {reason}")
        except CollectiveError:
            self._abandon()
        try:
            raise marked(error)
        finally:
            del error  # its traceback has this frame, and they would keep each other

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average what the ranks moved since the last synchronization; return at once if they made no step."""
        if self.steps == 0:
            return
        try:
            if self._overlap:
                self._queue.finish(self._move_common, self._find_refusal())
            else:
                self._average_one_by_one()
            self.synchronizations += 1
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Return to the common model."""
        self._return(tuple(self._common))
        self._masters.publish()
        self.steps = 0

    def _find_refusal(self) -> Exception | None:
        name = self._queue.find_change()
        if not name:
            return None
        return RuntimeError(
            f"{self._comm.here}: the gradient of {name!r} was changed or dropped between backward() and step(), after "
            "the optimizer had moved the parameter by it; no rank has made this step. Pass overlap=False to clip it, "
            "and call zero_grad() after step()"
        )

    def _average_one_by_one(self) -> None:
        for reducer in self.reducers:
            first = reducer is self.reducers[0]
            if first:
                self.agreement.attach(reducer.aggregator)
            self._take_update(reducer)
            reducer.aggregate()
            if first:
                try:
                    self.agreement.conclude()
                except BaseException:
                    reducer.undo()
                    raise
            self._move_common(reducer)

    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients that the optimizer cannot see, because it holds masters in their place."""
        self._masters.drop_gradients(set_to_none)
        self._scaled = False
        self.arrivals.restart()

    @torch.no_grad()
    def _fill(self, reducer: BucketReducer) -> bool:
        """See `mpicomp.torch.bucket_queue.Fill`."""
        if self._in_backward:
            if self.steps == 0:
                self._step_aside(reducer)
            with _only(self._optimizer, reducer.parameters):
                self._optimizer.step()
        self._take_update(reducer)
        return True

    def _step_aside(self, reducer: BucketReducer) -> None:
        """Give the parameters a copy of themselves in other memory, for the optimizer to move."""
        if not self._aside:
            self._aside = [self._memory_aside(one) for one in self.reducers]
        self._return(one for one in reducer.parameters if one in self._common)  # from a step that failed in backward
        aside = self._aside[reducer.bucket.index]
        torch._foreach_copy_(aside, reducer.parameters)
        for parameter, one in zip(reducer.parameters, aside, strict=True):
            self._common[parameter], parameter.data = parameter.data, one

    def _memory_aside(self, reducer: BucketReducer) -> list[Tensor]:
        """The reducer's own vector if it shares that with no other, and new memory for other orders of elements."""
        pairs = zip(reducer.parameters, reducer.fresh_vector_views(), strict=True)
        return [view if self._overlap and one.is_contiguous() else torch.empty_like(one) for one, view in pairs]

    def _return(self, parameters: Iterable[Tensor]) -> None:
        """Let parameters be the common model."""
        for parameter in parameters:
            parameter.data = self._common.pop(parameter)

    def _take_update(self, reducer: BucketReducer) -> None:
        local = [parameter.data for parameter in reducer.parameters]
        self._return(reducer.parameters)
        reducer.take_moves([parameter.data for parameter in reducer.parameters], local)

    @staticmethod
    def _move_common(reducer: BucketReducer) -> None:
        reducer.subtract_mean()

    def _gradients(self) -> Iterator[Tensor]:
        parameters = (parameter for reducer in self.reducers for parameter in reducer.parameters)
        return (parameter.grad for parameter in parameters if parameter.grad is not None)

    def state_dict(self) -> dict[str, Any]:
        """Counters, masters, and after local steps the common model, by the parameters' names."""
        return {
            "rounds": self.synchronizations,
            "steps": self.steps,
            "masters": {name: master.detach().clone() for name, master in self._named_masters().items()},
            "common": {name: view.clone() for name, view in self._named_common().items()} if self.steps else {},
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can take `state`."""
        require_counters(state, "rounds", "steps")
        parameters = {member.name: member.parameter for member in self.reducers.members}
        require_like(state, "masters", self._named_masters())
        require_like(state, "common", parameters if state["steps"] else {})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; its buckets are there."""
        self.synchronizations = state["rounds"]
        self.steps = state["steps"]
        for parameter, common in self._common.items():
            common.copy_(parameter)  # which has been loaded, or is going to be
        self._return(tuple(self._common))
        self._aside.clear()
        if self.steps:
            for reducer in self.reducers:
                self._step_aside(reducer)
        for here, saved in ((self._named_masters(), state["masters"]), (self._named_common(), state["common"])):
            for name, one in saved.items():
                here[name].copy_(one)

    def _named_masters(self) -> dict[str, Tensor]:
        masters = {id(master) for master in self._masters.masters}
        return {one.name: one.parameter for one in self.reducers.members if id(one.parameter) in masters}

    def _named_common(self) -> dict[str, Tensor]:
        members = self.reducers.members
        return {one.name: self._common[one.parameter] for one in members if one.parameter in self._common}

    def _any_nonfinite(self, warn: bool = False) -> bool:
        """Whether a rank's gradients hold NaN or infinity; the same answer on all, and maybe a warning at the first."""
        comm, text = self._comm, "the check of gradients before an optimizer step"
        comm.agree(fingerprint(text), lambda: text)
        flags = np.zeros(comm.size, np.int64)
        flags[comm.rank] = not all_finite(self._gradients())
        ranks = np.flatnonzero(comm.allreduce(flags))
        if ranks.size and warn and not self._warned:
            self._warned = True
            warnings.warn(
                f"rank {comm.rank} of {comm.size}: this step and others like it are skipped, as the gradients of "
                f"{len(ranks)} rank(s), the first of them rank {ranks[0]}, hold NaN or infinity",
                RuntimeWarning, stacklevel=4,
            )  # fmt: skip
        return bool(ranks.size)


@contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Have the optimizer hold these of its parameters alone."""
    chosen = set(parameters)
    kept = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in chosen]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params
