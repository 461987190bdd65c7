"""Proof, with all ranks' plans in one process, that they make an all-reduce; their cost in bytes and rounds.

The time they take on a modelled network is `collectives.cost.simulate.simulate_time`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collectives.schedules.plan import Plan, PlanError, Topology, Transfer


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One message on its way from a step of its source into a step of its destination."""

    source: int
    destination: int
    chunks: range
    weight: int
    held_weight: int
    source_step: int
    destination_step: int


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """Cost of a set of plans, which `prove` returns.

    Parameters
    ----------
    rounds : int
        Messages in the longest chain in which each message needs the one before.
    messages : tuple of int
        Transfers that each rank sends.
    chunks_sent : tuple of int
        Chunks in those transfers.

    Examples
    --------
    >>> from collectives import HalvingDoubling, Ring
    >>> from collectives.schedules.verify import all_plans, prove
    >>> [prove(all_plans(topology, 8)).rounds for topology in (Ring(), HalvingDoubling())]
    [14, 6]
    """

    rounds: int
    messages: tuple[int, ...]
    chunks_sent: tuple[int, ...]


def all_plans(topology: Topology, size: int) -> list[Plan]:
    """Return every rank's plan, in rank order.

    Parameters
    ----------
    topology : Topology
    size : int
        Number of ranks.

    Returns
    -------
    list of Plan

    Raises
    ------
    TopologyError
        The topology does not fit this number of ranks.

    Examples
    --------
    >>> from collectives import Ring
    >>> from collectives.schedules.verify import all_plans
    >>> len(all_plans(Ring(), 5))
    5
    """
    return [topology.plan(rank, size) for rank in range(size)]


def deliveries(plans: Sequence[Plan]) -> Iterator[PlannedMessage]:
    """Walk all ranks' plans together, in rank order, step by step with rendezvous sends, and yield each message."""
    # A rank enters a step when all transfers of the one before are through, and then posts all of the step's at once; a
    # message goes through when both ends have posted it. To act on each message as it comes, reading the source's
    # chunks and changing the destination's, is a correct execution of the plans.
    for rank, plan in enumerate(plans):
        if (plan.rank, plan.size, plan.n_chunks) != (rank, len(plans), plans[0].n_chunks):
            raise PlanError(
                f"entry {rank} of {len(plans)} plans is that of rank {plan.rank} of {plan.size} with {plan.n_chunks} "
                f"chunks: give one plan a rank, in rank order, all with {plans[0].n_chunks} chunks"
            )
    # Transfers that are posted and not through, by (source, destination); and how many of them each rank waits for.
    sends: defaultdict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
    recvs: defaultdict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
    waiting = [0] * len(plans)
    at_step = [-1] * len(plans)
    free = deque(range(len(plans)))
    while free:
        rank = free.popleft()
        at_step[rank] += 1
        if at_step[rank] == len(plans[rank].steps):
            continue
        step = plans[rank].steps[at_step[rank]]
        waiting[rank] = len(step.sends) + len(step.recvs)
        for send in step.sends:
            sends[rank, send.peer].append(send)
        for recv in step.recvs:
            recvs[recv.peer, rank].append(recv)
        pairs = [(rank, send.peer) for send in step.sends] + [(recv.peer, rank) for recv in step.recvs]
        for source, destination in pairs:
            if not sends[source, destination] or not recvs[source, destination]:
                continue
            send, recv = sends[source, destination].popleft(), recvs[source, destination].popleft()
            if (send.chunks, send.weight) != (recv.chunks, recv.weight):
                raise PlanError(
                    f"rank {destination} of {len(plans)}, step {at_step[destination]}: expects chunks {recv.chunks} of "
                    f"weight {recv.weight} from rank {source}, which in its step {at_step[source]} sends chunks "
                    f"{send.chunks} of weight {send.weight}"
                )
            yield PlannedMessage(
                source, destination, recv.chunks, recv.weight, recv.held_weight, at_step[source], at_step[destination]
            )
            for end in (source, destination):
                waiting[end] -= 1
                if not waiting[end]:
                    free.append(end)
    _check_finished(plans, at_step, sends, recvs)


def _check_finished(
    plans: Sequence[Plan],
    at_step: Sequence[int],
    sends: dict[tuple[int, int], deque[Transfer]],
    recvs: dict[tuple[int, int], deque[Transfer]],
) -> None:
    for queues, verb in ((recvs, "receive"), (sends, "send")):
        for (source, destination), queue in queues.items():
            if queue:
                rank, peer = (destination, source) if queues is recvs else (source, destination)
                finished = at_step[peer] == len(plans[peer].steps)
                whereabouts = "has finished" if finished else f"is in step {at_step[peer]} and waits itself"
                raise PlanError(
                    f"rank {rank} of {len(plans)}, step {at_step[rank]}: deadlock, it waits to {verb} chunks "
                    f"{queue[0].chunks}, but rank {peer} {whereabouts}"
                )


def prove(plans: Sequence[Plan]) -> ScheduleCost:
    """Check that the plans, in rank order, leave every rank with every chunk summed over all ranks, each counted once.

    Parameters
    ----------
    plans : sequence of Plan

    Returns
    -------
    ScheduleCost
        Rounds; messages and chunks that each rank sends.

    Raises
    ------
    PlanError
        The plans deadlock, disagree on the order of messages, lose a contribution or count it twice, state a wrong
        weight, or leave a chunk incomplete. The message names rank, step and chunk.

    Examples
    --------
    >>> from collectives import Ring
    >>> from collectives.schedules.verify import all_plans, prove
    >>> prove(all_plans(Ring(), 4))
    ScheduleCost(rounds=6, messages=(6, 6, 6, 6), chunks_sent=(6, 6, 6, 6))
    """
    size = len(plans)
    n_chunks = plans[0].n_chunks if plans else 0
    # held[rank][chunk]: the ranks summed in it, one bit each; depth: messages in the longest chain behind it.
    held = [[1 << rank] * n_chunks for rank in range(size)]
    depth = [[0] * n_chunks for _ in range(size)]
    for message in deliveries(plans):
        for chunk in message.chunks:
            incoming, there = held[message.source][chunk], held[message.destination][chunk]
            problem = _weight_problem(message, incoming, there)
            if problem:
                raise PlanError(
                    f"rank {message.destination} of {size}, step {message.destination_step}, chunk {chunk} from rank "
                    f"{message.source}: {problem}"
                )
            held[message.destination][chunk] = incoming | there
            chain = depth[message.source][chunk] + 1
            if message.held_weight:
                chain = max(chain, depth[message.destination][chunk])
            depth[message.destination][chunk] = chain
    everyone = (1 << size) - 1
    for rank, chunks in enumerate(held):
        for chunk, ranks in enumerate(chunks):
            if ranks != everyone:
                raise PlanError(
                    f"rank {rank} of {size}, after its last step {len(plans[rank].steps) - 1}: chunk {chunk} lacks the "
                    f"contributions of ranks {_members(everyone & ~ranks)}"
                )
    return ScheduleCost(
        rounds=max((chain for chains in depth for chain in chains), default=0),
        messages=tuple(sum(len(step.sends) for step in plan.steps) for plan in plans),
        chunks_sent=tuple(sum(len(send.chunks) for step in plan.steps for send in step.sends) for plan in plans),
    )


def _weight_problem(message: PlannedMessage, incoming: int, there: int) -> str:
    if incoming.bit_count() != message.weight:
        return f"the message should carry {message.weight} ranks but carries {incoming.bit_count()}"
    if not message.held_weight:
        lost = there & ~incoming
        return f"overwriting it loses the contributions of ranks {_members(lost)}" if lost else ""
    if there.bit_count() != message.held_weight:
        return f"its destination should hold {message.held_weight} ranks but holds {there.bit_count()}"
    twice = there & incoming
    return f"merging it counts the contributions of ranks {_members(twice)} twice" if twice else ""


def _members(ranks: int) -> list[int]:
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]
