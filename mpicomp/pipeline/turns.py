"""Clients of split learning in turn: what server and clients have in common.

Rank 0 of the communicator is the server's. The clients are spread over the others, client c on rank
1 + c mod (ranks - 1). In a turn the server works with one client, and the other ranks wait for the turn's end. The next
client goes on from the weights of the one before: these travel from client to client, and the server sees none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveError
from mpicomp.codecs.options import whole
from mpicomp.pipeline.agreement import DIFFERENT, in_words, job_rank, raise_first
from mpicomp.pipeline.cut import Compressions, CutEnd, check_compressions
from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.link import REFUSABLE
from mpicomp.pipeline.pair import Pair
from mpicomp.pipeline.schedule import Action
from mpicomp.pipeline.states import with_arrays, with_tensors
from mpicomp.pipeline.step import Step, Undo

Ends = TypeVar("Ends", bound=tuple[CutEnd, CutEnd])
SERVER = 0
_WEIGHTS = 21  # tag, above those of cuts and pairs
END, STEP, PREDICT = range(3)
"""What a client asks the server for."""


class Party(ABC, Generic[Ends]):
    """The server, or the clients of a rank; see `mpicomp.pipeline.split`."""

    def __init__(
        self,
        comm: Communicator,
        clients: int,
        modules: Sequence[nn.Module],
        compressions: Compressions,
        seed: int,
        wrong: str | None,
    ) -> None:
        self.comm, self.clients, self.steps = comm, clients, 0
        self.client: int | None = None
        self._modules, self._compressions, self._seed = modules, compressions, seed
        self._weights_of: int | None = None  # the client whose turn was the last
        self._cuts: dict[int, Ends] = {}
        self._pipeline = self._agree_on_options(wrong)
        self.clients = int(clients)
        own = range(clients) if comm.rank == SERVER else range(comm.rank - 1, clients, comm.size - 1)
        self._cuts = {client: self._ends(client) for client in own}
        comm.start_progress_thread()  # where it is not supported, messages go on while a rank waits

    def rank_of(self, client: int) -> int:
        """Where a client is."""
        return 1 + client % (self.comm.size - 1)

    def has(self, client: int) -> bool:
        """Whether a client is on this rank."""
        return self.comm.rank == self.rank_of(client)

    @property
    def bytes_sent(self) -> tuple[int, int]:
        """By this rank, in steps: of activations, and of their gradients."""
        sent = [cut.bytes_sent for cuts in self._cuts.values() for cut in cuts]
        return sum(forward for forward, _ in sent), sum(backward for _, backward in sent)

    # Turns -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, client: int) -> Iterator[bool]:
        """Have the server work with one client; collective. Yields whether this rank takes part, as either of the two.

        Raises
        ------
        PipelineError
            The ranks name different clients, or the ``with`` block has failed on another rank; on every rank. Where it
            has failed itself, its own error goes on.
        CollectiveTimeout, PeerFailure
            A rank does not answer, or the turn takes longer than the communicator's `arrival_timeout`.
        """
        self._begin(client)
        failure: Exception | None = None
        try:
            yield self.comm.rank in (SERVER, self.rank_of(client))
        except CollectiveError:
            raise
        except Exception as error:  # noqa: BLE001 - told to all ranks, and raised again
            failure = error
        except BaseException as error:  # such as KeyboardInterrupt: on this rank alone
            self.comm.give_up(error)
            raise
        if client in self._cuts:
            self._leave(failure)
        self.client = None
        answers = self.comm.allgather_object(in_words(failure))
        if failure is not None:
            raise failure
        raise_first(answers, f"the turn of client {client} failed", name="rank")

    def _begin(self, client: int) -> None:
        """Agree on whose turn it is, and bring the weights there."""
        if self.client is not None:
            raise RuntimeError(f"the turn of client {self.client} has not ended: leave its `with` block first")
        named = int(client) if whole(client, 0, self.clients - 1) else -1
        everyones = self.comm.allgather(np.array([[named]], np.int64))[:, 0].tolist()
        if len(set(everyones)) > 1 or named < 0:
            told = ", ".join(f"rank {rank}: {'none' if one < 0 else one}" for rank, one in enumerate(everyones))
            raise PipelineError(
                f"{self.comm.here}: the ranks name no client alike ({told}): let all begin the turn of one of the "
                f"clients 0 to {self.clients - 1}"
            )
        before, self._weights_of, self.client = self._weights_of, named, named
        if before is not None and self.rank_of(before) != self.rank_of(client):
            self._bring_weights(self.rank_of(before), self.rank_of(client))

    def _bring_weights(self, source: int, to: int) -> None:
        tensors = list(self._tensors())
        if not tensors:
            return
        if self.comm.rank == source:
            self.comm.send(torch.cat([_as_bytes(tensor) for tensor in tensors]).numpy(), to, _WEIGHTS)
        elif self.comm.rank == to:
            arrived = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
            self.comm.recv(arrived.numpy(), source, _WEIGHTS)
            for tensor, part in zip(tensors, torch.split(arrived, [tensor.nbytes for tensor in tensors]), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))

    def _tensors(self) -> Iterator[Tensor]:
        """Weights and buffers of this rank's modules, without gradients."""
        for module in self._modules:
            yield from (tensor.detach() for tensor in module.state_dict().values())

    def _pair(self, client: int) -> Pair:
        names, other = ("server", f"client {client}"), self.rank_of(client)
        return Pair(self.comm, other, names) if self.comm.rank == SERVER else Pair(self.comm, SERVER, names[::-1])

    @abstractmethod
    def _leave(self, failure: Exception | None) -> None:
        """End a turn in which this rank takes part."""

    @abstractmethod
    def _ends(self, client: int) -> Ends:
        """Make the ends of a client's two cuts that are on this rank."""

    # Steps -----------------------------------------------------------------------------------------------------------

    def _open(self, pair: Pair, cuts: Ends, wrong: str | None) -> None:
        """Begin a step on both ranks, or on neither."""
        kept = [cut.checksum() for cut in cuts]
        theirs = pair.exchange(kept)
        text = f"{self.comm.here}: the server and client {self.client} {DIFFERENT}"
        for cut, one, other in zip(cuts, kept, theirs.tolist(), strict=True):
            cut.lost = text if one != other else cut.lost
        if kept != theirs.tolist():  # before other errors: a checksum is compared only once
            raise PipelineError(text)
        pair.agree("the step was not begun", wrong)

    def _take(self, pair: Pair, cuts: Ends, actions: Sequence[tuple[Step, Action]]) -> None:
        """Take the actions of a step, and end it well on both ranks, or on neither."""
        undo = Undo(*self._modules, getattr(self, "_loss", None))
        try:
            for run, action in actions:
                run.take(action)
            for run, _ in actions:
                run.finish()
            failure = next((run.failure for run, _ in actions if run.failure is not None), None)
            pair.agree("the step failed", in_words(failure), cause=failure)
        except BaseException as error:
            undo.restore()
            for cut in cuts:
                cut.roll_back()
            if not isinstance(error, PipelineError | CollectiveError):  # such as KeyboardInterrupt: on this rank alone
                self.comm.give_up(error)
            raise
        for cut in cuts:
            cut.commit(self.steps)
        self.steps += 1

    # States ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps made, whose turn was the last, and messages that are kept; not the parameters of modules."""
        cuts = {client: [with_tensors(cut.state_dict()) for cut in both] for client, both in self._cuts.items()}
        return {**self._place(), "steps": self.steps, "weights_of": self._weights_of, "cuts": cuts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; collective. What the two ends of a cut do not both have is sent in full again.

        Raises
        ------
        PipelineError
            A state is that of another rank or of other clients, or damaged, or there is no room for it; on every rank.
            Unless the states are of others, what was kept before may be gone.
        """
        mine = self._place()
        theirs = {name: state.get(name) for name in mine}
        wrong = None if theirs == mine else f"the state is of {theirs}, not of {mine}: load what this rank has saved"
        raise_first(self.comm.allgather_object(wrong), "the state was not loaded", name="rank")
        failure: str | None = None
        try:
            for client, both in self._cuts.items():
                for cut, saved in zip(both, state["cuts"][client], strict=True):
                    cut.load_state_dict(with_arrays(saved))
        except (TypeError, KeyError, *REFUSABLE) as error:
            failure = in_words(error)
        raise_first(
            self.comm.allgather_object(failure), "the state was not loaded on all ranks: load another", name="rank"
        )
        self.steps, self._weights_of = int(state["steps"]), state["weights_of"]
        self.compare_stores()

    def _place(self) -> dict[str, int]:
        return {"rank": self.comm.rank, "ranks": self.comm.size, "clients": self.clients}

    def forget_messages(self) -> None:
        """Have all messages sent in full precision again; call it on every rank."""
        for both in self._cuts.values():
            for cut in both:
                cut.forget_messages()

    def compare_stores(self) -> int:
        """Have both ends of each cut forget the examples whose messages they do not share; how many; collective."""
        return sum(cut.compare() for both in self._cuts.values() for cut in both)

    def close(self) -> None:
        """Let go of messages that were kept, and of their files; the communicator stays open."""
        for both in self._cuts.values():
            for cut in both:
                cut.close()

    # Making ----------------------------------------------------------------------------------------------------------

    def _agree_on_options(self, wrong: str | None) -> int:
        """Return the number of this group of ranks, each of which draws random words of its own."""
        try:
            self._check_arguments()
        except (TypeError, ValueError) as error:
            wrong = wrong or str(error)
        forward, backward = self._compressions
        said = f"{self.clients} clients, forward {forward}, backward {backward}, seed {self._seed}"
        weights = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in self._tensors()] if wrong is None else []
        answers = self.comm.allgather_object((wrong, said, weights, job_rank(self.comm)))
        raise_first([one for one, *_ in answers], "split learning cannot begin", name="rank")
        if len({text for _, text, *_ in answers}) > 1:
            told = "; ".join(f"rank {rank}: {text}" for rank, (_, text, *_) in enumerate(answers))
            raise PipelineError(f"{self.comm.here}: the ranks are given different options, give all the same: {told}")
        for rank, (_, _, theirs, _) in enumerate(answers[2:], 2):
            if theirs != answers[1][2]:
                raise PipelineError(
                    f"{self.comm.here}: the layers of the clients on ranks 1 and {rank} have weights of different "
                    "shapes or types, but clients go on from each other's weights: make the same layers on both"
                )
        return int(answers[SERVER][3])

    def _check_arguments(self) -> None:
        for module in self._modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"the layers are a {type(module).__name__}: pass an nn.Module")
        if self.comm.size < 2:
            raise ValueError("there is no rank for clients: start two processes or more")
        if not whole(self.clients, self.comm.size - 1):
            raise ValueError(f"{self.clients!r:.80} clients are spread over {self.comm.size - 1} ranks: give each one")
        check_compressions(self._compressions)
        self._seed = index(self._seed)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
