"""Clients of split learning in turn: the base of server and clients.

Rank 0 of the communicator is the server's. The clients are spread over the others, client c on rank
1 + c mod (ranks - 1). In a turn the server works with one client, and the other ranks wait for the turn's end. The next
client goes on from the weights of the one before: these travel from client to client, and never to the server.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import index
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.annotations import override
from collectives.errors import CollectiveError
from collectives.quoting import shown
from mpicomp.codecs.options import whole
from mpicomp.pipeline.agreement import (
    DIFFERENT,
    Pair,
    PipelineError,
    agree_on_options,
    checksums_differ,
    failure_text,
    raise_faults,
)
from mpicomp.pipeline.cut import Compressions, CutEnd, check_compressions
from mpicomp.pipeline.cut_holder import CutHolder
from mpicomp.pipeline.schedule import Action
from mpicomp.pipeline.slice_step import Loss, SliceStep
from mpicomp.pipeline.store_states import State
from mpicomp.pipeline.tensors import as_bytes, with_tensors
from mpicomp.torch.devices import require_reachable

First = TypeVar("First", bound=CutEnd)
Second = TypeVar("Second", bound=CutEnd)
SERVER = 0
_WEIGHTS = 21  # tag, above those of cuts and pairs
END, STEP, PREDICT = range(3)
"""Requests of a client to the server."""


class Party(CutHolder, Generic[First, Second]):
    """The server, or the clients of a rank; see `mpicomp.pipeline.split_learning`."""

    _rank_name: ClassVar[str] = "rank"
    _loss: Loss | None = None  # of clients
    # a client has two cuts, and a party has one end of each
    _end_classes: tuple[type[First], type[Second]]

    def __init__(
        self,
        comm: Communicator,
        clients: int,
        modules: Sequence[nn.Module],
        compressions: Compressions,
        seed: int,
        fault: str | None,
    ) -> None:
        self.comm, self.clients, self.steps = comm, clients, 0
        self.client: int | None = None
        self._modules, self._compressions, self._seed = modules, compressions, seed
        self._weights_of: int | None = None  # the client whose turn was the last
        self._cuts: dict[int, tuple[First, Second]] = {}
        self._pipeline = self._agree_on_options(fault)
        self.clients = int(clients)
        own = range(clients) if comm.rank == SERVER else range(comm.rank - 1, clients, comm.size - 1)
        self._cuts = {client: self._ends(client) for client in own}
        comm.start_progress_thread()  # where it is not supported, messages go on while a rank waits

    def rank_of(self, client: int) -> int:
        """Return the rank of the client of number `client`."""
        return 1 + client % (self.comm.size - 1)

    def has(self, client: int) -> bool:
        """Return True if the client of number `client` is on this rank."""
        return self.comm.rank == self.rank_of(client)

    @override
    def _held_cuts(self) -> list[CutEnd]:
        return list(chain.from_iterable(self._cuts.values()))

    # Turns -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, client: int) -> Iterator[bool]:
        """Have the server work with one client, while the ``with`` block runs; collective.

        Parameters
        ----------
        client : int
            Number of the client; the same on all ranks.

        Yields
        ------
        bool
            True if this rank takes part, as the server or with the client.

        Raises
        ------
        PipelineError
            The ranks name different clients, or the ``with`` block has failed on another rank; on every rank. Where it
            has failed itself, its own error goes on.
        CollectiveTimeout, PeerFailure
            A rank does not answer, or the turn takes longer than the communicator's `arrival_timeout`.
        RuntimeError
            The block of another turn has not ended on this rank.
        """
        self._begin(client)
        failure: Exception | None = None
        try:
            try:
                yield self.comm.rank in (SERVER, self.rank_of(client))
            except CollectiveError:
                raise
            except Exception as error:  # noqa: BLE001 - reported to all ranks, and raised again
                failure = error
            except BaseException as error:  # such as KeyboardInterrupt: on this rank alone
                self.comm.ending.give_up(error)
                raise
            if client in self._cuts:
                self._leave(failure)
        finally:
            self.client = None  # a later turn then raises the communicator's error
        faults = self.comm.allgather_object(failure_text(failure))
        if failure is not None:
            raise failure
        raise_faults(faults, f"the turn of client {client} failed", name=self._rank_name)

    def _begin(self, client: int) -> None:
        """Agree on the client of the turn, and bring the weights to its rank."""
        if self.client is not None:
            raise RuntimeError(
                f"{self.comm.here}: the turn of client {self.client} has not ended: leave its `with` block first"
            )
        named = int(client) if whole(client, 0, self.clients - 1) else -1
        everyones = self.comm.allgather(np.array([[named]], np.int64))[:, 0].tolist()
        if len(set(everyones)) > 1 or named < 0:
            listed = ", ".join(f"rank {rank}: {'none' if one < 0 else one}" for rank, one in enumerate(everyones))
            raise PipelineError(
                f"{self.comm.here}: the ranks do not name the same client ({listed}): let all begin the turn of "
                f"one of the clients 0 to {self.clients - 1}"
            )
        before, self._weights_of = self._weights_of, named
        if before is not None and self.rank_of(before) != self.rank_of(client):
            self._bring_weights(self.rank_of(before), self.rank_of(client))
        self.client = named

    def _bring_weights(self, source: int, to: int) -> None:
        tensors = list(self._tensors())
        if not tensors:
            return
        if self.comm.rank == source:
            self.comm.send(np.concatenate([as_bytes(tensor) for tensor in tensors]), to, _WEIGHTS)
        elif self.comm.rank == to:
            arrived = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device="cpu")
            self.comm.recv(arrived.numpy(), source, _WEIGHTS)
            for tensor, part in zip(tensors, torch.split(arrived, [tensor.nbytes for tensor in tensors]), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))

    def _tensors(self) -> Iterator[Tensor]:
        """Yield weights and buffers of this rank's modules, without gradients."""
        for module in self._modules:
            yield from (tensor.detach() for tensor in module.state_dict().values())

    def _pair(self, client: int) -> Pair:
        names, other = ("server", f"client {client}"), self.rank_of(client)
        return Pair(self.comm, other, names) if self.comm.rank == SERVER else Pair(self.comm, SERVER, names[::-1])

    @abstractmethod
    def _leave(self, failure: Exception | None) -> None:
        """End a turn in which this rank takes part."""

    def _ends(self, client: int) -> tuple[First, Second]:
        """Return the ends of a client's two cuts that are on this rank."""
        other = self.rank_of(client) if self.comm.rank == SERVER else SERVER
        first, second = self._end_classes
        return (
            first(self.comm, other, 2 * client, self._compressions, self._seed, self._pipeline),
            second(self.comm, other, 2 * client + 1, self._compressions, self._seed, self._pipeline),
        )

    # Steps -----------------------------------------------------------------------------------------------------------

    def _open(self, pair: Pair, cuts: tuple[First, Second], fault: str | None) -> None:
        """Begin a step on both ranks, or on neither."""
        kept = np.array([cut.checksum() for cut in cuts])
        differ = checksums_differ(kept, np.array(pair.exchange(kept.tolist())))
        text = f"{self.comm.here}: the server and client {self.client} {DIFFERENT}"
        for cut, one in zip(cuts, differ, strict=True):
            cut.lost = text if one else cut.lost
        if differ.any():  # before other errors: a checksum is compared only once
            raise PipelineError(text)
        pair.agree("the step was not begun", fault or cuts[0].lost or cuts[1].lost or None)

    def _take(self, pair: Pair, cuts: tuple[First, Second], actions: Sequence[tuple[SliceStep, Action]]) -> None:
        """Take the actions of a step, and commit it on both ranks, or on neither."""
        with self._transaction(cuts, (*self._modules, self._loss)):
            for run, action in actions:
                run.take(action)
            for run, _ in actions:
                run.finish()
            failure = next((run.failure for run, _ in actions if run.failure is not None), None)
            pair.agree("the step failed", failure_text(failure), cause=failure)

    # States ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return steps, the client of the last turn, and messages that are kept; not the parameters of modules."""
        cuts = {client: [with_tensors(cut.state_dict()) for cut in both] for client, both in self._cuts.items()}
        return {**self._place(), "steps": self.steps, "weights_of": self._weights_of, "cuts": cuts}

    def load_state_dict(self, state: State) -> None:
        """Go on from `state_dict`; collective. Messages that the two ends of a cut do not share are sent in full again.

        Parameters
        ----------
        state : dict
            This rank's; not changed.

        Raises
        ------
        PipelineError
            A state is that of another rank, of other clients or of another turn, or damaged, or there is no room for
            it; on every rank. Unless the states are of others, messages that were kept before may be gone.
        """
        mine = self._place()
        theirs = {name: state.get(name) for name in mine} if isinstance(state, dict) else shown(state)
        fault = None
        if theirs != mine:
            fault = f"the state is of {theirs}, not of {mine}: load the state that this rank has saved"
        client = state.get("weights_of") if fault is None else None
        if client is not None and not whole(client, 0, self.clients - 1):
            fault = f"the state is damaged, as its last turn was that of client {shown(client)}: load an earlier one"
        # weights travel between ranks only: turns of clients on the same rank may differ
        source = None if fault is not None or client is None else self.rank_of(client)
        everyones = self.comm.allgather_object((fault is None, source))
        if fault is None and {one for is_sound, one in everyones if is_sound} != {source}:
            # the next client's weights would be missing
            fault = f"the last turn of its state was that of client {shown(client)}: load states of one turn"
        saved = (pair for client, both in self._cuts.items() for pair in zip(both, state["cuts"][client], strict=True))
        self._load_cuts(state, fault, saved)
        self._weights_of = None if client is None else int(client)

    def _place(self) -> dict[str, int]:
        return {"rank": self.comm.rank, "ranks": self.comm.size, "clients": self.clients}

    # Making ----------------------------------------------------------------------------------------------------------

    def _agree_on_options(self, fault: str | None) -> int:
        """Return the number of this group of ranks, each of which draws random words of its own."""
        try:
            for module in self._modules:
                if not isinstance(module, nn.Module):
                    raise TypeError(f"the layers are a {type(module).__name__}: pass an nn.Module")
                for name, tensor in module.state_dict().items():
                    require_reachable(name, tensor)
            if self.comm.size < 2:
                raise ValueError("there is no rank for clients: start two processes or more")
            if not whole(self.clients, self.comm.size - 1):
                ranks = self.comm.size - 1
                raise ValueError(f"{self.clients!r:.80} clients are spread over {ranks} ranks: give each one")
            check_compressions(self._compressions)
            self._seed = index(self._seed)
        except (TypeError, ValueError) as error:
            fault = fault or str(error)
        forward, backward = self._compressions
        options = f"{self.clients} clients, forward {forward}, backward {backward}, seed {self._seed}"
        pipeline = agree_on_options(self.comm, fault, options, "split learning cannot begin", self._rank_name)[SERVER]
        weights = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in self._tensors()]
        everyones = self.comm.allgather_object(weights)
        for rank, theirs in enumerate(everyones[2:], 2):
            if theirs != everyones[1]:
                raise PipelineError(
                    f"{self.comm.here}: the layers of the clients on ranks 1 and {rank} have weights of different "
                    "shapes or types, but clients go on from each other's weights: make the same layers on both"
                )
        return pipeline
