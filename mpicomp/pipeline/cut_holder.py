"""Rank that holds ends of cuts: its steps, which succeed on all ranks or change nothing, and its state."""

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
from mpicomp.pipeline.cut import CutEnd
from mpicomp.pipeline.messages import REFUSABLE
from mpicomp.pipeline.store import State
from mpicomp.pipeline.tensors import with_arrays


class CutHolder(ABC):
    """Base of stages, and of server and clients of split learning."""

    comm: Communicator
    steps: int
    _rank_name: ClassVar[str]  # in errors

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
        saved = SavedModules(modules)
        try:
            yield
        except BaseException as error:
            saved.restore()
            for cut in cuts:
                cut.roll_back()
            if not isinstance(error, PipelineError | CollectiveError):  # such as KeyboardInterrupt: on this rank alone
                self.comm.give_up(error)
            raise
        for cut in cuts:
            cut.commit(self.steps)
        self.steps += 1

    def _load_cuts(self, state: State, fault: str | None, states: Iterable[tuple[CutEnd, State]]) -> None:
        """Load the states of all cuts if no rank has a fault; collective.

        Raises
        ------
        PipelineError
            A rank has a fault, or a state cannot be loaded; on all ranks.
        """
        name = self._rank_name
        raise_faults(self.comm.allgather_object(fault), "the state was not loaded", name=name)
        try:
            for cut, saved in states:
                cut.load_state_dict(with_arrays(saved))
        except (TypeError, KeyError, *REFUSABLE) as error:
            fault = failure_text(error)
        action = f"the state was not loaded on all {name}s: load another"
        raise_faults(self.comm.allgather_object(fault), action, name=name)
        self.steps = int(state["steps"])
        self.compare_stores()

    def forget_messages(self) -> None:
        """Have all messages sent in full precision again; call it on every rank."""
        for cut in self._held_cuts():
            cut.forget_messages()

    def compare_stores(self) -> int:
        """Have both ends of each cut forget the examples whose messages they do not share; collective.

        Returns
        -------
        int
            Number of messages that were forgotten on this rank.
        """
        return sum(cut.compare() for cut in self._held_cuts())

    def close(self) -> None:
        """Release the messages that are kept, and their files; the communicator stays open."""
        for cut in self._held_cuts():
            cut.close()


class SavedModules:
    """Copy of gradients of parameters, and of buffers such as running statistics.

    Parameters
    ----------
    modules
        Objects other than `nn.Module` are ignored.
    """

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
            parameter.grad = _restored(gradient, saved)
        for module, name, buffer, saved in self._buffers:
            module._buffers[name] = _restored(buffer, saved)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _restored(tensor: Tensor | None, saved: Tensor | None) -> Tensor | None:
    """Return the tensor as it was, in its own memory: others may have views of it."""
    if tensor is None or saved is None:
        return None
    if tensor.is_sparse:  # whose entries cannot be copied into
        return saved
    return tensor.copy_(saved)
