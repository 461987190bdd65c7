"""Fragments of a model: sets of tensors that are synchronized in different steps, while later steps go on.

    fragment p is sent after a step t with     t mod H == floor(p H / P)
    its mean is applied after step             t + delay:   x_p <- x_p - d;   local_p <- a local_p + (1 - a) x_p
    or, of blend="steps":                                                     local_p <- x_p + (local_p - sent_p)

H is `local_steps`, P the number of fragments, and a the option `blend`. Between the two steps the ranks make `delay`
local steps of this fragment too, of which a blend of 0 keeps nothing, as x_p replaces the local tensors, and "steps"
keeps all: sent_p are the local tensors as they were sent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from collectives import Communicator
from collectives.quoting import shown
from mpicomp.torch.buckets.bucket_queue import BucketQueue, Fill
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.state.schema import FRAGMENTS, IN_FLIGHT, IN_FLIGHT_STEPS, NamedTensors, State
from mpicomp.torch.synchronizer.agreed_buckets import collect_agreed, start_agreed
from mpicomp.torch.synchronizer.step_agreement import StepAgreement, StepIntent

_BLOCK = re.compile(r"([^.]*[^.\d][^.]*\.)*\d+(?=\.)")
"""Start of a name up to the first module whose name is a number, as those of a list have."""


Blend: TypeAlias = float | Literal["steps"]
"""Share of a rank's own values that it keeps when a mean is applied, or "steps": all steps since it was sent."""


@dataclass(frozen=True)
class FragmentPlan:
    """Steps in which the fragments are sent, and in which their means are applied."""

    local_steps: int
    fragments: int = 1
    delay: int = 0
    blend: Blend = 0.0

    @property
    def is_whole(self) -> bool:
        """Flag: the model is synchronized as a whole, at once and to the common model."""
        return self.fragments == 1 and not self.keeps_local

    @property
    def keeps_local(self) -> bool:
        """Flag: local steps go on from their own values while a fragment is in flight, or after it was applied."""
        return self.delay > 0 or self.weights[0] > 0

    @property
    def keeps_steps(self) -> bool:
        """Flag: the local steps that were made while a fragment was in flight stay."""
        return self.blend == "steps" and self.delay > 0

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of a rank's own values, or of its steps, and of the common ones when a mean is applied."""
        if self.blend == "steps":
            return float(self.keeps_steps), 1.0
        return self.blend, 1 - self.blend

    def due(self, turn: int) -> list[int]:
        """Return the fragments that are sent after step `turn`, counted modulo `local_steps`."""
        return self._due.get(turn % self.local_steps, [])

    @cached_property
    def _due(self) -> dict[int, list[int]]:
        due: dict[int, list[int]] = {}
        for number in range(self.fragments):
            due.setdefault(number * self.local_steps // self.fragments, []).append(number)
        return due


def deal_fragments(members: Sequence[NamedParameter], fragments: int) -> dict[str, int]:
    """Return the fragment of each parameter, by its name: the layers are dealt like cards, in their order.

    A layer is a numbered block, such as "encoder.3", or elsewhere a module. If there are fewer layers than fragments,
    tensors are dealt instead.

    Raises
    ------
    ValueError
        There are fewer tensors than fragments.
    """
    if fragments > len(members):
        raise ValueError(f"fragments={fragments} is more than the {len(members)} trained tensors; choose fewer")
    layers: dict[str, int] = {}
    for member in members:
        layers.setdefault(layer_of(member.name), len(layers))
    if len(layers) < fragments:
        return {member.name: i % fragments for i, member in enumerate(members)}
    return {member.name: layers[layer_of(member.name)] % fragments for member in members}


def layer_of(name: str) -> str:
    """Return the layer of a parameter, by its name."""
    found = _BLOCK.match(name)
    return found[0] if found else name.rpartition(".")[0] or name


class FragmentInFlight:
    """A fragment that has been sent, until its means are applied.

    Attributes
    ----------
    number
        The fragment.
    remaining
        Steps until the means are applied.
    ended
        The reducers that have a mean, once the flight is settled.
    failures
        The error of the flight, if it has failed, until it is raised.
    """

    def __init__(
        self,
        number: int,
        reducers: Sequence[BucketReducer],
        remaining: int,
        agreement: StepAgreement,
        refusal: Exception | None = None,
    ) -> None:
        self.number, self.reducers, self.remaining = number, reducers, remaining
        self._agreement, self._intent = agreement, StepIntent(refusal)
        self._queue: BucketQueue | None = None
        self.ended: list[BucketReducer] = list(reducers)  # as of a state that was loaded, which has their means
        self.failures: list[Exception] = []

    def start(self, comm: Communicator, fill: Fill) -> None:
        """Fill the buckets' vectors, and begin to average them."""
        self._queue, self.ended = BucketQueue(self.reducers, comm, fill), []
        start_agreed(self._queue, self._agreement, self._intent)

    def settle(self) -> None:
        """Wait for the means. An error is kept in `failures`."""
        queue, self._queue = self._queue, None
        if queue is None:
            return
        try:
            collect_agreed(queue, self._agreement, self._intent, self.ended.append)
        except Exception as error:  # noqa: BLE001 - raised where the means are applied, on all ranks in the same step
            self.failures.append(error)

    def state(self, has_moves: bool) -> State:
        """Return number, remaining steps and a copy of the means, which are there, and of the moves that were sent."""
        copies = {key: {name: one.clone() for name, one in self._tensors(key).items()} for key in _keys(has_moves)}
        return {"fragment": self.number, "remaining": self.remaining, **copies}

    def load(self, state: State, has_moves: bool) -> None:
        """Take over the means of a state, and the moves that were sent."""
        for key in _keys(has_moves):
            for name, one in self._tensors(key).items():
                one.copy_(state[key][name])

    def _tensors(self, key: str) -> NamedTensors:
        pairs = ((one.bucket.names, one.mean_views if key == "means" else one.vector_views) for one in self.reducers)
        return {name: view for names, views in pairs for name, view in zip(names, views, strict=True)}


def _keys(has_moves: bool) -> tuple[str, ...]:
    return ("means", "moves") if has_moves else ("means",)


class Fragments:
    """The fragments of a model, their turn, and those in flight.

    `numbers` has the fragment of each parameter by its name, and is kept up to date.

    Attributes
    ----------
    turn
        Local steps modulo `local_steps`.
    in_flight
        The fragments that have been sent and whose means are not applied, in the order in which they were sent.
    """

    def __init__(self, plan: FragmentPlan, numbers: dict[str, int], comm: Communicator) -> None:
        self.plan, self.turn = plan, 0
        self.in_flight: list[FragmentInFlight] = []
        self._numbers, self._comm = numbers, comm

    def count_step(self) -> list[FragmentInFlight]:
        """Count a local step, and return the fragments whose means are to be applied after it."""
        self.turn = (self.turn + 1) % self.plan.local_steps
        for one in self.in_flight:
            one.remaining -= 1
        return [one for one in self.in_flight if one.remaining <= 0]

    def of(self, number: int, reducers: Iterable[BucketReducer]) -> Iterator[BucketReducer]:
        """Go through those of the reducers that belong to a fragment."""
        return (one for one in reducers if self._numbers[one.bucket.names[0]] == number)

    def deal(self, joining: Sequence[NamedParameter]) -> None:
        """Put parameters that join into fragments: that of their layer, or of a further layer."""
        layers = {layer_of(name): number for name, number in self._numbers.items()}
        for one in joining:
            self._numbers[one.name] = layers.setdefault(layer_of(one.name), len(layers) % self.plan.fragments)

    def drop_in_flight(self) -> None:
        """Wait for the fragments in flight, which all ranks have sent, and forget them."""
        for flight in self.in_flight:
            flight.settle()
        self.in_flight.clear()

    # States -----------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return turn, numbers, and the means of the fragments in flight, which are waited for.

        Raises
        ------
        RuntimeError
            The synchronization of a fragment in flight has failed.
        """
        for flight in self.in_flight:
            flight.settle()
            if flight.failures:
                raise RuntimeError(
                    f"{self._comm.here}: fragment {flight.number} cannot be saved, since its synchronization has "
                    "failed; the step that applies it raises the error"
                )
        in_flight = [flight.state(self.plan.keeps_steps) for flight in self.in_flight]
        return {"turn": self.turn, "numbers": dict(self._numbers), "in_flight": in_flight}

    def check(self, state: object, parameters: NamedTensors, optional: Collection[str]) -> None:
        """Raise ValueError unless a state can be loaded, which may lack the `optional` ones of the parameters."""
        found = FRAGMENTS.check(state)
        numbers, in_flight = found["numbers"], found["in_flight"]
        if self.plan.is_whole and in_flight:
            raise ValueError(
                "the state has fragments in flight; build the optimizer with the same fragments= and delay="
            )
        lacking = (parameters.keys() - numbers).difference(optional)
        if lacking or numbers.keys() - parameters or not all(type(one) is int and one >= 0 for one in numbers.values()):
            raise ValueError("the state's fragments have other parameters than the model; load an earlier one")
        if max(numbers.values()) >= self.plan.fragments and not self.plan.is_whole:
            raise ValueError(
                f"the state has {max(numbers.values()) + 1} fragments; build the optimizer with fragments= of as many"
            )
        for one in in_flight:
            number = IN_FLIGHT.check(one)["fragment"]
            if self.plan.keeps_steps and "moves" not in one:
                raise ValueError(
                    f"the state's fragment {number} in flight lacks the moves that were sent; build the optimizer with "
                    "the blend= of the one that was saved"
                )
            schema = IN_FLIGHT_STEPS if self.plan.keeps_steps else IN_FLIGHT
            members = {name: parameter for name, parameter in parameters.items() if numbers.get(name) == number}
            schema.check_tensors(schema.check(one), {"means": members, "moves": members})

    def check_buckets(self, buckets: Sequence[Sequence[str]], rounds: State) -> None:
        """Raise ValueError unless each bucket of a state lies in one fragment, and has moved as a whole."""
        saved = {} if self.plan.is_whole else rounds.get("fragments", {})
        numbers = saved.get("numbers", self._numbers)
        for names in buckets:
            if len({numbers.get(name) for name in names}) > 1:
                raise ValueError(
                    f"the state was saved with other fragments, which have {shown(names[0])} in one bucket with "
                    "tensors of another fragment here; build the optimizer with the same fragments="
                )
            if len({name in rounds["common"] for name in names}) > 1:
                raise ValueError(
                    f"the state's common model has a part of the bucket of {shown(names[0])}; load another"
                )

    def load_numbers(self, rounds: State, joining: Sequence[NamedParameter]) -> None:
        """Take over the fragment of each parameter from a state, before its buckets are made."""
        if not self.plan.is_whole:
            self.deal(joining)
            self._numbers |= rounds.get("fragments", {}).get("numbers", {})

    def load(self, rounds: State, reducers: Sequence[BucketReducer], agreement: StepAgreement) -> None:
        """Take over turn and fragments in flight."""
        # a state saved with more local steps is followed by a synchronization in the next step
        turn = min(rounds["steps"], self.plan.local_steps - 1)
        state = rounds.get("fragments", {"turn": turn, "in_flight": []})
        self.turn = state["turn"] % self.plan.local_steps
        for one in state["in_flight"]:
            number = one["fragment"]
            flight = FragmentInFlight(number, [*self.of(number, reducers)], one["remaining"], agreement)
            flight.load(one, self.plan.keeps_steps)
            self.in_flight.append(flight)
