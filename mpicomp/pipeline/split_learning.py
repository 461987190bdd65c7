"""Split learning: clients keep the first and the last layers, inputs and targets; a server has the layers between.

A step of a client passes two cuts forward, and the same two back::

    client    first -> a             b -> last -> loss -> db               da -> first
    server             a -> middle -> b                   db -> middle -> da

Clients take turns, and each goes on from the weights of the one before. Activations can travel as differences to the
last message of the same example (AQ-SGD), gradients in few bits of their largest elements alone.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

from collectives import Communicator
from collectives.annotations import override
from mpicomp.pipeline.activations import Compression, Direct
from mpicomp.pipeline.agreement import Pair, PipelineError, failure_text
from mpicomp.pipeline.cut import Downstream, Upstream
from mpicomp.pipeline.message_layout import Tensors
from mpicomp.pipeline.schedule import Backward, Forward
from mpicomp.pipeline.slice_step import Loss, PartOfBatch, SliceStep, pass_forward
from mpicomp.pipeline.store_rows import Ids
from mpicomp.pipeline.turns import END, PREDICT, SERVER, STEP, Party

_FORWARD, _BACKWARD = Forward(0), Backward(0)


class SplitClient(Party[Upstream, Downstream]):
    """The clients of a rank other than 0, which share the first layers and the last ones.

    Parameters
    ----------
    first : nn.Module
        Takes inputs and returns a tensor, or several, like the module of a `PipelineStage`.
    last : nn.Module
        Takes the outputs of the server's layers.
    comm : Communicator
        Of the server, on rank 0, and the clients.
    clients : int
        Of all ranks together; at least one for each rank but the server's. The same on all ranks.
    loss : callable
        ``loss(output, targets)`` of a batch.
    forward, backward : Direct or Deltas
        How activations and their gradients travel, in both cuts; the same on all ranks. `Deltas` only forward. Each
        client's ids begin at 0, and `Deltas` takes the largest client's number of examples.
    seed : int
        Of stochastic rounding; the same on all ranks.

    Attributes
    ----------
    client : int or None
        Client whose turn it is.
    steps : int
        Number of steps on this rank so far.

    Raises
    ------
    PipelineError
        An argument is wrong on some rank, or differs from that of another; on every rank.

    References
    ----------
    Wang et al., "Fine-tuning language models over slow networks using activation quantization with guarantees",
    NeurIPS 2022 (arXiv 2206.01299), appendix H.6.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.pipeline import SplitClient, SplitServer
    >>> def serve(comm):
    ...     middle = torch.nn.Linear(4, 4)
    ...     server, optimizer = SplitServer(middle, comm, clients=2), torch.optim.SGD(middle.parameters(), lr=0.1)
    ...     for client in range(2):
    ...         with server.turn(client):
    ...             while server.serve():
    ...                 optimizer.step()
    ...                 optimizer.zero_grad()
    ...     return server.steps
    >>> def train(comm):
    ...     first, last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    ...     clients = SplitClient(first, last, comm, clients=2, loss=torch.nn.functional.mse_loss)
    ...     for client in range(2):
    ...         with clients.turn(client) as takes_part:
    ...             if takes_part:
    ...                 inputs = torch.full((8, 3), client + 1.0)
    ...                 loss = clients.step(inputs, inputs[:, :1])  # then a step of an optimizer of the client's
    ...                 output = clients.predict(inputs)
    ...     clients.close()
    ...     return clients.steps, tuple(output.shape)
    >>> mpicomp.run_local(3, lambda comm: train(comm) if comm.rank else serve(comm))
    [2, (1, (8, 1)), (1, (8, 1))]
    """

    _end_classes = (Upstream, Downstream)

    def __init__(
        self,
        first: nn.Module,
        last: nn.Module,
        comm: Communicator,
        clients: int,
        *,
        loss: Loss,
        forward: Compression | None = None,
        backward: Compression | None = None,
        seed: int = 0,
    ) -> None:
        self.first, self.last, self._loss = first, last, loss
        fault = None if callable(loss) else "clients have no loss: pass loss=, which is called with outputs and targets"
        if comm.rank == SERVER:
            fault = "rank 0 is the server's: make a SplitServer there"
        compressions = forward or Direct(), backward or Direct()
        super().__init__(comm, clients, (first, last), compressions, seed, fault)

    def step(self, inputs: Tensors, targets: Tensors, ids: ArrayLike | None = None) -> float:
        """Add the gradients of a batch's loss to ``.grad`` of all layers, while the server is in `SplitServer.serve`.

        Parameters
        ----------
        inputs, targets : tensor[examples, ...]
            Or several, in a tuple or dictionary.
        ids : integers[examples]
            Which of the client's examples these are. `Deltas` needs them. An example that augmentation changes needs
            an id for each variant, such as ``2 * id + flipped``.

        Returns
        -------
        float
            The loss, which is not sent to the server.

        Raises
        ------
        PipelineError
            Something failed on the client or on the server, which the error names; on both. Gradients, buffers of
            layers, such as running statistics, and messages that are kept for examples are as before the step, and it
            can be repeated.
        RuntimeError
            It is the turn of no client on this rank.
        CollectiveTimeout, PeerFailure
            The server does not answer. The communicator can be used no longer.
        """
        pair, (up, down) = self._at_work()
        part, fault = PartOfBatch.check(inputs, targets, ids, first=True, last=True, cuts=(up, down))
        listed = _request(pair, STEP, part)
        self._open(pair, (up, down), fault)
        head = SliceStep(self.first, None, up, [listed], inputs=inputs)
        tail = SliceStep(self.last, down, None, [listed], loss=self._loss, targets=targets)
        self._take(pair, (up, down), [(head, _FORWARD), (tail, _FORWARD), (tail, _BACKWARD), (head, _BACKWARD)])
        return tail.loss

    def predict(self, inputs: Tensors) -> Tensors:
        """Return the output of the whole model, while the server is in `SplitServer.serve`.

        All layers are in evaluation mode meanwhile, activations travel in full precision and are not kept.

        Parameters
        ----------
        inputs : tensor[examples, ...]
            Or several, in a tuple or dictionary.

        Returns
        -------
        tensor or tensors

        Raises
        ------
        PipelineError, RuntimeError, CollectiveTimeout, PeerFailure
            As `step`.
        """
        pair, (up, down) = self._at_work()
        part, fault = PartOfBatch.check(inputs, None, None, first=True, last=False)
        listed = _request(pair, PREDICT, part)
        pair.agree("the batch was not evaluated", fault)
        _, failure = pass_forward(self.first, None, up, inputs, listed)
        output, late = pass_forward(self.last, down, None, None, listed)
        failure = failure or late
        pair.agree("the evaluation failed", failure_text(failure), cause=failure)
        return output

    def _at_work(self) -> tuple[Pair, tuple[Upstream, Downstream]]:
        if self.client is None or not self.has(self.client):
            whose = "no client's turn" if self.client is None else f"the turn of client {self.client}, on another rank"
            raise RuntimeError(f"{self.comm.here}: it is {whose}: call this in `with turn(client)` of a client here")
        return self._pair(self.client), self._cuts[self.client]

    @override
    def _leave(self, failure: Exception | None) -> None:
        pair, _ = self._at_work()
        _request(pair, END, PartOfBatch())


class SplitServer(Party[Downstream, Upstream]):
    """The layers between those of the clients, on rank 0.

    Parameters
    ----------
    middle : nn.Module
        Takes the outputs of the clients' first layers, and returns the inputs of their last ones.
    comm, clients, forward, backward, seed
        As of `SplitClient`; the same on all ranks.

    Attributes
    ----------
    client, steps
        As of `SplitClient`.

    Raises
    ------
    PipelineError
        As of `SplitClient`.

    Examples
    --------
    `SplitClient` has a training loop. The server and the clients save their states together:

    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.pipeline import SplitClient, SplitServer
    >>> def save_and_load(comm):
    ...     if comm.rank == 0:
    ...         party = SplitServer(torch.nn.Linear(4, 4), comm, clients=2)
    ...     else:
    ...         layers = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    ...         party = SplitClient(*layers, comm, clients=2, loss=torch.nn.functional.mse_loss)
    ...     party.load_state_dict(party.state_dict())
    ...     return [party.rank_of(client) for client in range(2)], party.has(client=1)
    >>> mpicomp.run_local(3, save_and_load)
    [([1, 2], False), ([1, 2], False), ([1, 2], True)]
    """

    _end_classes = (Downstream, Upstream)

    def __init__(
        self,
        middle: nn.Module,
        comm: Communicator,
        clients: int,
        *,
        forward: Compression | None = None,
        backward: Compression | None = None,
        seed: int = 0,
    ) -> None:
        self.middle = middle
        self._ended = True  # the client has ended its turn
        fault = None if comm.rank == SERVER else "the server is on rank 0: make a SplitClient here"
        super().__init__(comm, clients, (middle,), (forward or Direct(), backward or Direct()), seed, fault)

    def serve(self) -> bool:
        """Take part in the client's next step; `SplitClient` has an example.

        Batches that the client evaluates are served in between.

        Returns
        -------
        bool
            False: the client's turn has ended, and no step was made.

        Raises
        ------
        PipelineError, CollectiveTimeout, PeerFailure
            As `SplitClient.step`.
        RuntimeError
            It is no client's turn.
        """
        if self.client is None:
            raise RuntimeError(f"{self.comm.here}: it is no client's turn: call this in `with turn(client)`")
        pair, cuts = self._pair(self.client), self._cuts[self.client]
        while not self._ended:
            kind, ids, listed = _await_request(pair)
            if kind == STEP:
                self._step(pair, cuts, ids, listed)
                return True
            if kind == PREDICT:
                self._evaluate(pair, cuts, listed)
            else:
                self._ended = True
        return False

    def _step(self, pair: Pair, cuts: tuple[Downstream, Upstream], ids: Ids | None, listed: Ids) -> None:
        checked = cuts if listed.size else ()  # a client with a fault sends no examples
        _, fault = PartOfBatch.check(None, None, ids, first=False, last=False, cuts=checked)
        self._open(pair, cuts, fault)
        run = SliceStep(self.middle, *cuts, [listed])
        self._take(pair, cuts, [(run, _FORWARD), (run, _BACKWARD)])

    def _evaluate(self, pair: Pair, cuts: tuple[Downstream, Upstream], listed: Ids) -> None:
        pair.agree("the batch was not evaluated", None)
        _, failure = pass_forward(self.middle, *cuts, None, listed)
        pair.agree("the evaluation failed", failure_text(failure), cause=failure)

    @override
    def _begin(self, client: int) -> None:
        super()._begin(client)
        self._ended = False

    @override
    def _leave(self, failure: Exception | None) -> None:
        # Refuse further requests of the client, until its turn ends.
        assert self.client is not None
        pair = self._pair(self.client)
        fault = f"it has left the turn, after {failure_text(failure)}" if failure else "it has left the turn"
        while not self._ended:
            kind, *_ = _await_request(pair)
            self._ended = kind == END
            if kind != END:
                with suppress(PipelineError):  # which the client raises
                    if kind == STEP:
                        self._open(pair, self._cuts[self.client], fault)
                    else:
                        pair.agree("the client's request was refused", fault)


def _request(pair: Pair, kind: int, part: PartOfBatch) -> Ids:
    """Send a request to the server; returns the ids of the batch, or numbers in place of them."""
    pair.send([kind, part.listed.size, part.ids is not None])
    if part.ids is not None:
        pair.send(part.ids)
    return part.listed


def _await_request(pair: Pair) -> tuple[int, Ids | None, Ids]:
    """Return a client's request, the ids of its batch, and these or numbers in place of them."""
    kind, examples, has_ids = pair.receive(3).tolist()
    ids = pair.receive(examples) if has_ids else None
    return kind, ids, np.arange(examples) if ids is None else ids
