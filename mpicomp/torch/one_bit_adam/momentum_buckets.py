"""Buckets of the "momenta" mode: two reducers and the moments of each, the cohorts of their parameters, and states.

Parameters that are added or unfrozen while the optimizer trains form a cohort of their own: with moments of zero, a
count of steps, and a v that is frozen after as many steps as that of the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from collectives.annotations import override
from collectives.quoting import shown
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms import Algorithm, Dense
from mpicomp.feedback.base import BY_ELEMENT
from mpicomp.torch.buckets.bucket_layout import Bucket
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.buckets.bucket_reducers import BucketReducers
from mpicomp.torch.master_weights import MasterWeights
from mpicomp.torch.one_bit_adam.adam_moments import AdamMoments, Cohort, Groups, VarianceFreeze, check_group
from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.state.rank_state import require_aggregators
from mpicomp.torch.state.schema import JOINED, MOMENTUM, NamedTensors, State
from mpicomp.torch.synchronizer.bucket_averaging import SynchronizerParts
from mpicomp.torch.synchronizer.synchronizer import Synchronizer

EntryShape: TypeAlias = Literal["elements", "elements of frozen", "number"]
"""Shape of a state's tensors: of all parameters, of those whose v is frozen, or a number for each parameter."""
Entries: TypeAlias = Mapping[str, EntryShape]
Moments = TypeVar("Moments", bound=AdamMoments)


class MomentumBuckets(Synchronizer, Generic[Moments]):
    """Buckets whose gradients are averaged until v is frozen, and then first moments.

    Momenta are averaged by the reducers `squeezed`, in the same buckets as the gradients. `moments` makes those of a
    bucket. A state is recognized by the `options` as text.

    Attributes
    ----------
    steps
        Number of steps made.
    moments
        Moments of each bucket.
    """

    mode = "momenta"
    entries: ClassVar[Entries] = {"m": "elements", "v": "elements"}
    """Tensors of a state."""
    saves_squeezed: ClassVar[bool] = False
    """Flag: a state has the aggregators of momenta alone; else those of the last step."""
    state_schema = MOMENTUM.extended(dict.fromkeys(entries, "tensors"))

    def __init__(
        self,
        parts: SynchronizerParts,
        squeezed: BucketReducers,
        masters: MasterWeights,
        freeze_rule: VarianceFreeze,
        options: str,
        moments: Callable[[Bucket, Mapping[Tensor, int]], Moments],
    ) -> None:
        super().__init__(parts)
        self.steps, self._places = 0, self._parameters.places
        self._squeezed, self._make_moments = squeezed, moments
        self._masters, self._options = masters, options
        self._name = type(parts.optimizer).__name__
        self._cohorts = [Cohort(freeze_rule)]
        self.moments = self._moments_of(squeezed, self._cohorts[0])  # of each bucket
        self.active = [*parts.reducers]

    @property
    @override
    def saved_aggregators(self) -> Sequence[Aggregator]:
        return [one.aggregator for one in (self._squeezed if self.saves_squeezed else self.active)]

    @property
    @override
    def every_reducer(self) -> Sequence[BucketReducer]:
        return [*self.reducers, *self._squeezed]

    @property
    def frozen(self) -> bool:
        """Flag: v of all parameters is frozen."""
        return all(cohort.frozen for cohort in self._cohorts)

    def _moments_of(self, reducers: Sequence[BucketReducer], cohort: Cohort) -> list[Moments]:
        """Make the moments of buckets."""
        group_of = number_groups(self._optimizer.param_groups)
        made = [self._make_moments(reducer.bucket, group_of) for reducer in reducers]
        for moments in made:
            moments.cohort = cohort
        return made

    def _moments_in(self, cohort: Cohort) -> list[Moments]:
        return [moments for moments in self.moments if moments.cohort is cohort]

    @override
    def _open_buckets(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
        dense, squeezed = self.reducers.add(members, _dense(algorithms)), self._squeezed.add(members, algorithms)
        self._cohorts.append(Cohort(self._cohorts[0].rule.renewed(), self.steps))
        self.active += dense
        self.moments += self._moments_of(squeezed, self._cohorts[-1])

    def _follow_freezes(self) -> None:
        """Use the reducers of momenta where v is frozen, and those of gradients elsewhere."""
        self.active[:] = _chosen([one.cohort.frozen for one in self.moments], self.reducers, self._squeezed)

    def _clear_errors(self, moments: Moments, **entries: int) -> None:
        """Clear the residuals of a bucket's momenta, and set other entries of their state."""
        aggregator = self._squeezed[moments.bucket.index].aggregator
        state, kinds = aggregator.state_dict(), aggregator.state_kinds
        clear = {key: np.zeros_like(state[key]) for key, kind in kinds.items() if kind in BY_ELEMENT}
        aggregator.load_state_dict({**state, **clear, **entries})

    # States -----------------------------------------------------------------------------------------------------------

    @override
    def own_entries(self) -> State:
        tensors = {key: {name: one.clone() for name, one in found.items()} for key, found in self._named().items()}
        first, *later = self._cohorts
        joined = [
            {
                "buckets": [moments.bucket.names for moments in self._moments_in(cohort)],
                "joined": cohort.joined,
                "frozen": cohort.frozen,
                "freeze_rule": cohort.rule.state_dict(),
            }
            for cohort in later
        ]
        return {
            "options": self._options,
            "steps": self.steps,
            "frozen": first.frozen,
            **tensors,
            "freeze_rule": first.rule.state_dict(),
            **({"joined": joined} if joined else {}),
        }

    @override
    def check_own(self, own: State) -> None:
        rule = self._cohorts[0].rule
        rule.check_state_dict(own["freeze_rule"])
        if own["options"] != self._options:
            raise ValueError(
                f"the state is of {shown(own['options'])}, and this is {self._options}; use the same options"
            )
        joined = _joined_of(own)
        for one in joined:
            rule.check_state_dict(one["freeze_rule"])
        changes, names = self._changes, self._names_with(joined)
        changes.find()
        algorithms = changes.algorithms
        frozen = [own["frozen"]] * len(self._moments_in(self._cohorts[0]))
        frozen += [one["frozen"] for one in joined for _ in one["buckets"]]
        with (
            self.reducers.trial(names, changes.joining, _dense(algorithms)) as dense,
            self._squeezed.trial(names, changes.joining, algorithms) as squeezed,
        ):
            members = _members_of(squeezed)
            shapes: dict[EntryShape, NamedTensors] = {
                "elements": members,
                "elements of frozen": _members_of(compress(squeezed, frozen)),
                "number": dict.fromkeys(members, torch.zeros((), dtype=torch.float32, device="cpu")),
            }
            expected = {key: shapes[shape] for key, shape in self.entries.items()}
            self.state_schema.check_tensors(own, {**expected, "masters": self._masters_of(members)})
            saved = squeezed if self.saves_squeezed else _chosen(frozen, dense, squeezed)
            require_aggregators(own, [reducer.aggregator for reducer in saved])

    @override
    def restored_point(self, own: State) -> str:
        later = [names for one in _joined_of(own) for names in one["buckets"]]
        more = f", after {later} have joined{self._changes.describe_joining(later)}" if later else ""
        return f"after {own['steps']} steps, with v {'frozen' if own['frozen'] else 'in motion'}{more}"

    @override
    @torch.no_grad()
    def load_own(self, own: State) -> None:
        joined, changes = _joined_of(own), self._changes
        names = self._names_with(joined)
        self.reducers.restore(names, changes.joining, _dense(changes.algorithms))
        members = self._squeezed.restore(names, changes.joining, changes.algorithms)
        self._join(members)
        self.steps = self.synchronizations = own["steps"]
        first = self._cohorts[0]
        first.frozen = own["frozen"]
        first.rule.load_state_dict(own["freeze_rule"])
        self._cohorts, self.moments = [first], self._moments_in(first)
        for one in joined:
            cohort = Cohort(first.rule.renewed(), one["joined"], one["frozen"])
            cohort.rule.load_state_dict(one["freeze_rule"])
            self._cohorts.append(cohort)
            start = len(self.moments)
            self.moments += self._moments_of(self._squeezed[start : start + len(one["buckets"])], cohort)
        self._follow_freezes()
        for key, tensors in self._named().items():
            for name, tensor in tensors.items():
                tensor.copy_(own[key][name])
        for moments in self.moments:
            if moments.cohort.frozen:
                moments.find_masked()
            else:  # the state is of a step before the first momenta were sent
                self._clear_errors(moments, step=0)
        self.models_compared = False

    def _names_with(self, joined: Sequence[State]) -> list[list[str]]:
        """Return the names of all buckets, of which these have joined after the first ones."""
        first = [moments.bucket.names for moments in self._moments_in(self._cohorts[0])]
        return first + [names for one in joined for names in one["buckets"]]

    @override
    def wrapped_state(self) -> State:
        return torch.optim.Optimizer.state_dict(self._optimizer)

    @override
    def _load_optimizer(self, state: State) -> None:
        groups: State = {"state": {}, "param_groups": state.get("param_groups")}
        torch.optim.Optimizer.load_state_dict(self._optimizer, groups)
        for group in self._optimizer.param_groups:
            check_group(group, self._optimizer)

    def _named(self) -> Mapping[str, NamedTensors]:
        """Return the tensors of a state, by the parameters' names; no copies."""
        found: dict[str, dict[str, Tensor]] = {}
        for moments in self.moments:
            for key, tensors in moments.named().items():
                found.setdefault(key, {}).update(tensors)
        return {**found, "masters": self._masters_of(_members_of(self._squeezed))}

    def _masters_of(self, members: NamedTensors) -> NamedTensors:
        masters = set(self._masters.masters)
        return {name: one.detach() for name, one in members.items() if one in masters}


def number_groups(groups: Groups) -> dict[Tensor, int]:
    """Return the number of each parameter's group."""
    return {one: number for number, group in enumerate(groups) for one in group["params"]}


def _chosen(
    frozen: Sequence[bool], dense: Sequence[BucketReducer], squeezed: Sequence[BucketReducer]
) -> list[BucketReducer]:
    """Return one of two reducers of each bucket: the squeezing one where v is frozen."""
    return [two if stays else one for stays, one, two in zip(frozen, dense, squeezed, strict=True)]


def _members_of(reducers: Iterable[BucketReducer]) -> NamedTensors:
    return {member.name: member.parameter for reducer in reducers for member in reducer.bucket.members}


def _joined_of(own: State) -> list[State]:
    """Return the checked entries about parameters that joined later; an empty list if no parameter did."""
    joined = own.get("joined", [])
    if not isinstance(joined, list):
        raise ValueError(f"the state's joined parameters are {shown(joined)}, not a list; load an earlier one")
    return [JOINED.check(one) for one in joined]


def _dense(names: Iterable[str]) -> dict[str, Algorithm]:
    return dict.fromkeys(names, Dense())
