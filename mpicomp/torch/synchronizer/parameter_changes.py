"""Parameters that are added, unfrozen or frozen while an optimizer trains.

Each rank finds them by itself at a step, and the ranks compare their descriptions in a message of that step: see
`StepAgreement`. A parameter that was added or unfrozen then joins, with a bucket of its own or with others that join. A
synchronized parameter that was frozen keeps its place in its bucket, counts as zeros there, and does not move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from collectives.quoting import shown
from mpicomp.algorithms import Algorithm
from mpicomp.torch.front_ends import names_by_parameter
from mpicomp.torch.master_weights import MasterWeights
from mpicomp.torch.parameters import NamedParameter, ParameterGroup, Parameters

if TYPE_CHECKING:
    from mpicomp.torch.local_steps.outer_step import OuterStep

ADDED, FROZEN = "added or unfrozen parameter", "frozen parameter"
"""Names of the changes in messages, before their numbers."""
PLACES = "division of the parameters among groups"
AlgorithmsOf: TypeAlias = Callable[[Sequence[NamedParameter]], Mapping[str, Algorithm]]
"""Function that returns the algorithms of parameters by name, and raises ValueError for some that cannot join."""


class ParameterChanges:
    """Changes of an optimizer's parameters since they were last agreed on, as this rank finds them.

    `masters` stand in for 16-bit parameters, and all members below are those that the optimizer holds.

    Attributes
    ----------
    joining : list of NamedParameter
        Parameters that were added or unfrozen, and have no bucket yet.
    algorithms : mapping
        Their algorithms by name.
    frozen : list of NamedParameter
        Parameters with a place in a bucket that require no gradient any more.
    fixed : str
        Where the parameters must stay as they are, the reason and cure in words, and each rank refuses changes by
        itself; else empty.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: torch.optim.Optimizer,
        algorithms_of: AlgorithmsOf,
        masters: MasterWeights | None = None,
        outer: OuterStep | None = None,
        fixed: str = "",
    ) -> None:
        self.joining: list[NamedParameter] = []
        self.frozen: list[NamedParameter] = []
        self.algorithms: Mapping[str, Algorithm] = {}
        self._parameters, self._optimizer, self._masters = parameters, optimizer, masters
        self._outer, self._algorithms_of, self.fixed = outer, algorithms_of, fixed
        self._own: list[NamedParameter] = []  # the model's own parameters that join
        parameters.hold({} if masters is None else masters.by_parameter)

    def find(self) -> None:
        """Find the changes; put masters in the place of 16-bit parameters that join.

        Raises
        ------
        ValueError
            A parameter cannot be synchronized, or the optimizer has lost one that is.
        """
        self.joining = []
        frozen = self._held(self._parameters.find_frozen())
        if frozen and self.fixed:  # `frozen` stays empty: the other ranks apply means that were sent before
            raise ValueError(f"parameter {frozen[0].name!r} was frozen while the optimizer trains, {self.fixed}")
        self.frozen = frozen
        self._own = self._parameters.find_joining()
        if not self._own:
            if self._outer is not None:
                self._outer.hold(())
            return
        if self.fixed:
            raise ValueError(f"parameter {self._own[0].name!r} was added or unfrozen, {self.fixed}")
        self.algorithms = self._algorithms_of(self._own)
        if self._masters is not None:
            self._masters.adopt(self._optimizer)
            self._parameters.hold(self._masters.by_parameter)
        joining = self._held(self._own)
        if self._outer is not None:
            if self._masters is not None:
                self._masters.replace_in(self._outer.optimizer)
            self._outer.hold(joining)
        self.joining = joining

    def describe(self) -> dict[str, str]:
        """Return each change in words, and the places of the parameters; equal on ranks with the same changes."""
        found = {PLACES: self._parameters.places} | {f"{ADDED} {i}": s for i, s in enumerate(self._forms(self._own))}
        return found | {f"{FROZEN} {i}": repr(member.name) for i, member in enumerate(self.frozen)}

    def describe_joining(self, buckets: Sequence[Sequence[str]]) -> str:
        """Return in words the parameters that join by loading a state with these buckets; empty without any."""
        saved = {name for names in buckets for name in names}
        joining = ", ".join(self._forms([member for member in self._own if member.name in saved]))
        return f", with {joining}" if joining else ""

    def _forms(self, members: Sequence[NamedParameter]) -> list[str]:
        return [
            f"{one.name!r} ({one.parameter.dtype}{list(one.parameter.shape)} on {one.parameter.device.type} by "
            f"{self.algorithms[one.name]})"
            for one in members
        ]

    def join(self, members: Sequence[NamedParameter]) -> None:
        """Count these of the joining parameters among the synchronized ones from now on."""
        self._parameters.join(members)
        if self._outer is not None:
            self._outer.join(members)
        joined = {member.name for member in members}
        self.joining = [one for one in self.joining if one.name not in joined]
        self._own = [one for one in self._own if one.name not in joined]

    def drop_frozen_gradients(self, sent: Collection[Tensor] = ()) -> None:
        """Let optimizers pass over the frozen parameters, also by weight decay and momentum; not over those `sent`."""
        for member in self.frozen:
            if member.parameter not in sent:
                member.parameter.grad = None

    @contextmanager
    def keeping_frozen(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Restore those of the parameters that are frozen to their values before the block."""
        if not self.frozen:
            yield
            return
        here = set(parameters)
        kept = [(one.parameter, one.parameter.detach().clone()) for one in self.frozen if one.parameter in here]
        yield
        for parameter, values in kept:
            parameter.detach().copy_(values)

    def add_group(self, group: ParameterGroup, add: Callable[[ParameterGroup], None]) -> None:
        """Add a group to the optimizer by its method `add`, or leave the optimizer as it was and raise its error.

        Names in the group are taken, also where the optimizer's other groups have none.

        Raises
        ------
        ValueError
            A parameter of the group cannot be synchronized.
        """
        if isinstance(group, dict) and "params" not in group:
            raise TypeError(f'the parameter group is {shown(group)}; pass a dict, such as {{"params": [weight, bias]}}')
        params = group["params"] if isinstance(group, dict) else None
        if params is not None and not isinstance(params, Tensor | set):
            params = group["params"] = list(params)
            if params and all(isinstance(one, tuple) for one in params):
                self._parameters.name(names_by_parameter(params))
                if not any("param_names" in one for one in self._optimizer.param_groups):
                    group["params"] = [parameter for _, parameter in params]
        groups = self._optimizer.param_groups
        before = len(groups)
        try:
            add(group)
            self.find()
        except (ValueError, TypeError):
            del groups[before:]
            raise

    def _held(self, members: list[NamedParameter]) -> list[NamedParameter]:
        return members if self._masters is None or not members else self._masters.substitute(members)
