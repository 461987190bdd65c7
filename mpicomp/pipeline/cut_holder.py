"""Ranks that hold ends of cuts, whose steps succeed on all ranks or change nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from collectives import Communicator
from collectives.errors import CollectiveError
from mpicomp.pipeline.agreement import PipelineError, failure_text, raise_faults
from mpicomp.pipeline.cut import CutEnd, call_all
from mpicomp.pipeline.messages import REFUSABLE
from mpicomp.pipeline.store_states import State
from mpicomp.pipeline.tensors import with_arrays


class CutHolder(ABC):
    """Base of stages, and of server and clients of split learning."""

    comm: Communicator
    steps: int
    _rank_name: ClassVar[str]  # in errors
    _held: Sequence[CutEnd] | None = None  # cuts of a step that is not yet committed
    _holds: bool = False

    @abstractmethod
    def _held_cuts(self) -> Sequence[CutEnd]:
        """Return all ends of cuts on this rank, in an order in which both ends of each can be compared."""

    @property
    def bytes_sent(self) -> tuple[int, int]:
        """Bytes of activations and of their gradients that this rank has sent in steps."""
        sent = [cut.bytes_sent for cut in self._held_cuts()]
        return sum(forward for forward, _ in sent), sum(backward for _, backward in sent)

    @contextmanager
    def _transaction(self, cuts: Sequence[CutEnd], modules: Sequence[object]) -> Iterator[None]:
        """Count the step of the block; if the block fails, restore modules and messages as they were before it."""
        if self._held is not None:
            raise PipelineError(
                f"{self.comm.here}: a second step within the block of one: make one step in each block of "
                "StageCheckpoints.step()"
            )
        with torch.inference_mode(False):  # later steps cannot change gradients that are inference tensors
            saved = SavedModules(modules)
        try:
            with torch.inference_mode(False):  # enables gradients, lest a caller's no_grad() leaves them out in silence
                yield
        except BaseException as error:
            with torch.inference_mode(False):
                saved.restore()
            for cut in cuts:
                cut.roll_back()
            if not isinstance(error, PipelineError | CollectiveError):  # such as KeyboardInterrupt: on this rank alone
                self.comm.ending.give_up(error)
            raise
        self._held = cuts
        if not self._holds:
            self.settle_messages(True)

    def hold_messages(self) -> None:
        """Change the messages that are kept for the next step at `settle_messages` only, not at the step's end."""
        self._holds = True

    @property
    def holds_step(self) -> bool:
        """True after a step that succeeded on all ranks, and whose messages are held."""
        return self._held is not None

    def settle_messages(self, commits: bool) -> None:
        """Commit the step whose messages are held, if there is one, or have its messages as they were before it."""
        cuts, self._held, self._holds = self._held, None, False
        for cut in cuts or ():
            if commits:
                cut.commit(self.steps)
            else:
                cut.roll_back()
        self.steps += commits and cuts is not None

    def _load_cuts(self, state: State, fault: str | None, states: Iterable[tuple[CutEnd, State]]) -> None:
        """Load the states of all cuts, or raise PipelineError on all ranks; collective."""
        name = self._rank_name
        raise_faults(self.comm.allgather_object(fault), "the state was not loaded", name=name)
        steps = self.steps
        try:
            # all cuts, also where a state is refused: otherwise the two ends of a cut differ, and wait for each other
            call_all(cut.begin_again for cut in self._held_cuts())
            for cut, saved in states:
                cut.load_state_dict(with_arrays(saved))
            steps = int(state["steps"])
        except (AttributeError, LookupError, TypeError, *REFUSABLE) as error:
            fault = failure_text(error)
        action = f"the state was not loaded on all {name}s: load another"
        raise_faults(self.comm.allgather_object(fault), action, name=name)
        self.compare_stores()
        self.steps = steps

    def forget_messages(self) -> None:
        """Have all messages sent in full precision again; call it on every rank."""
        call_all(cut.forget_messages for cut in self._held_cuts())

    def compare_stores(self) -> int:
        """Have both ends of each cut forget the examples whose messages they do not share; collective.

        Returns
        -------
        int
            Number of messages that were forgotten on this rank.

        Raises
        ------
        PipelineError
            A file of messages of some rank failed; on every rank. Steps are refused until a state is loaded.
        """
        forgotten = 0
        failure: Exception | None = None
        for cut in self._held_cuts():
            try:
                forgotten += cut.compare()
            except REFUSABLE as error:  # the other ends of later cuts wait for this rank
                failure = failure or error
        faults = self.comm.allgather_object(failure_text(failure))
        raise_faults(faults, "the messages were not compared", failure, self._rank_name)
        return forgotten

    def close(self) -> None:
        """Release the messages that are kept, and their files; the communicator stays open."""
        call_all(cut.close for cut in self._held_cuts())


class SavedModules:
    """Copy of gradients of parameters, and of buffers such as running statistics, of the modules among objects."""

    def __init__(self, modules: Sequence[object]) -> None:
        found = [one for one in modules if isinstance(one, nn.Module)]
        parameters = {id(one): one for module in found for one in module.parameters()}.values()
        self._gradients = [(one, one.grad, _copy(one.grad)) for one in parameters]
        self._buffers = [
            (one, name, buffer, _copy(buffer))
            for module in found
            for one in module.modules()
            for name, buffer in one._buffers.items()
            if buffer is None or not is_lazy(buffer)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the saved values back."""
        for parameter, gradient, saved in self._gradients:
            parameter.grad = _restore(gradient, saved)
        for module, name, buffer, saved in self._buffers:
            module._buffers[name] = _restore(buffer, saved)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _restore(tensor: Tensor | None, saved: Tensor | None) -> Tensor | None:
    """Return the tensor as it was, in its own memory: others may have views of it."""
    if tensor is None or saved is None:
        return None
    if tensor.is_sparse:  # whose entries cannot be copied into
        return saved
    with torch.inference_mode(tensor.is_inference()):  # in which alone such a tensor can be copied into
        return tensor.copy_(saved)
