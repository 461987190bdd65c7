"""Fragments of a model: sets of tensors that are synchronized in different steps, while later steps go on.

    fragment p is sent after a step t with     t mod H == floor(p H / P)
    its mean is applied after step             t + delay:   x_p <- x_p - d;   local_p <- a local_p + (1 - a) x_p

H is `local_steps`, P the number of fragments, and a the option `blend`. Between the two steps the ranks make `delay`
local steps of this fragment too, of which a blend of 0 keeps nothing, as x_p replaces the local tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from collectives import Communicator
from collectives.quoting import shown
from mpicomp.torch.bucket_queue import BucketQueue, Fill
from mpicomp.torch.bucket_reducers import BucketReducer
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.optimizer.agreed_buckets import collect_agreed, start_agreed
from mpicomp.torch.optimizer.step_agreement import StepAgreement, StepIntent
from mpicomp.torch.state.schema import FRAGMENTS, IN_FLIGHT, NamedTensors, State

_BLOCK = re.compile(r"([^.]*[^.\d][^.]*\.)*\d+(?=\.)")
"""Start of a name up to the first module whose name is a number, as those of a list have."""


@dataclass(frozen=True)
class FragmentPlan:
    """Steps in which the fragments are sent, and in which their means are applied."""

    local_steps: int
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Flag: the model is synchronized as a whole, at once and to the common model."""
        return self.fragments == 1 and not self.keeps_local

    @property
    def keeps_local(self) -> bool:
        """Flag: local steps go on from their own values while a fragment is in flight, or after it was applied."""
        return self.delay > 0 or self.blend > 0

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


def deal_joining(members: Sequence[NamedParameter], dealt: Mapping[str, int], fragments: int) -> dict[str, int]:
    """Return the fragment of each parameter that joins others: that of its layer, or of a further layer."""
    layers = {layer_of(name): number for name, number in dealt.items()}
    return {one.name: layers.setdefault(layer_of(one.name), len(layers) % fragments) for one in members}


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
    """

    def __init__(
        self, number: int, reducers: Sequence[BucketReducer], remaining: int, agreement: StepAgreement
    ) -> None:
        self.number, self.reducers, self.remaining = number, reducers, remaining
        self._agreement, self._intent = agreement, StepIntent()
        self._queue: BucketQueue | None = None
        self._ended: list[BucketReducer] = list(reducers)  # as of a state that was loaded, which has their means
        self._failure: Exception | None = None

    def start(self, comm: Communicator, fill: Fill) -> None:
        """Fill the buckets' vectors, and begin to average them."""
        self._queue, self._ended = BucketQueue(self.reducers, comm, fill), []
        start_agreed(self._queue, self._agreement, self._intent)

    def settle(self, comm: Communicator) -> None:
        """Wait for the means. Errors are kept for `take_means`."""
        queue, self._queue = self._queue, None
        if queue is None:
            return
        try:
            collect_agreed(queue, self._agreement, self._intent, self._ended.append, comm)
        except Exception as error:  # noqa: BLE001 - raised where the means are applied, on all ranks in the same step
            self._failure = error

    def state(self) -> State:
        """Return number, remaining steps and a copy of the means, which are there."""
        pairs = [pair for one in self.reducers for pair in zip(one.bucket.names, one.mean_views, strict=True)]
        return {
            "fragment": self.number,
            "remaining": self.remaining,
            "means": {name: mean.clone() for name, mean in pairs},
        }

    def load_means(self, means: NamedTensors) -> None:
        """Take over the means of a state."""
        for reducer in self.reducers:
            for name, mean in zip(reducer.bucket.names, reducer.mean_views, strict=True):
                mean.copy_(means[name])

    @property
    def failed(self) -> bool:
        """Flag: an error is kept."""
        return self._failure is not None

    def take_failure(self) -> Exception | None:
        """Return the error of the flight, and forget it."""
        failure, self._failure = self._failure, None
        return failure

    @property
    def ended(self) -> Sequence[BucketReducer]:
        """The reducers that have a mean, once the flight is settled."""
        return self._ended


def check_fragments(rounds: State, plan: FragmentPlan, parameters: NamedTensors) -> None:
    """Raise ValueError unless the entry "fragments" of a state's rounds can be loaded; the state may lack it."""
    if "fragments" not in rounds:
        return
    found = FRAGMENTS.check(rounds["fragments"])
    numbers, in_flight = found["numbers"], found["in_flight"]
    if plan.is_whole and in_flight:
        raise ValueError("the state has fragments in flight; build the optimizer with the same fragments= and delay=")
    if set(numbers) != set(parameters) or not all(type(one) is int and one >= 0 for one in numbers.values()):
        raise ValueError("the state's fragments have other parameters than the model; load an earlier one")
    if max(numbers.values()) >= plan.fragments and not plan.is_whole:
        raise ValueError(
            f"the state has {max(numbers.values()) + 1} fragments; build the optimizer with fragments= of as many"
        )
    for one in in_flight:
        number = IN_FLIGHT.check(one)["fragment"]
        members = {name: parameter for name, parameter in parameters.items() if numbers[name] == number}
        IN_FLIGHT.check_tensors(one, {"means": members})


def check_buckets(buckets: Sequence[Sequence[str]], rounds: State, fragment_of: Mapping[str, int]) -> None:
    """Raise ValueError unless each bucket of a state lies in one fragment, and has moved as a whole."""
    for names in buckets:
        if len({fragment_of.get(name) for name in names}) > 1:
            raise ValueError(
                f"the state was saved with other fragments, which have {shown(names[0])} in one bucket with tensors of "
                "another fragment here; build the optimizer with the same fragments="
            )
        if len({name in rounds["common"] for name in names}) > 1:
            raise ValueError(f"the state's common model has a part of the bucket of {shown(names[0])}; load another")
