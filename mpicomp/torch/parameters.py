"""The parameters of an optimizer that are synchronized.

Parameters that require a gradient when the distributed optimizer is made are synchronized. Others wait: frozen ones
until they require a gradient, and those that are added to the optimizer until all ranks have agreed on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor

from collectives.consistency.descriptions import fingerprint
from collectives.quoting import shown
from mpicomp.torch.devices import require_reachable

ParameterGroup: TypeAlias = dict[str, Any]
LISTS = ("params", "param_names")
"""Entries of a parameter group that are not options."""
NARROW = (torch.float16, torch.bfloat16)
MASTER_MARK = "_mpicomp_master"
"""Attribute of masters: see `mpicomp.torch.master_weights`."""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter and its name in error messages."""

    name: str
    parameter: Tensor


class Parameters:
    """An optimizer's parameters, in its order, those without elements left out.

    `names` are for error messages, where parameters without a name are called by their position.

    Attributes
    ----------
    trained
        Parameters that are synchronized.
    waiting
        The other ones: frozen, or added and not yet agreed on by all ranks.

    Raises
    ------
    ValueError
        A parameter is not a dense floating-point tensor on the CPU or a GPU, two have one name, or none is to be
        trained.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        self.trained: list[NamedParameter] = []
        self.waiting: list[NamedParameter] = []
        self._optimizer = optimizer
        # also of parameters that may be added; weak references would forbid to swap tensors
        self._names = dict(names or _names_in(optimizer))
        self._masters: Mapping[Tensor, Tensor] = {}
        for member in self._named(()):
            (self.trained if member.parameter.requires_grad else self.waiting).append(member)
        if not self.trained:
            raise ValueError(
                "the optimizer holds no parameter that requires a gradient; nothing is left to synchronize"
            )
        self._forms = [_form(member.parameter) for member in self.trained]
        self._held, self._places = _held(optimizer), ""  # the latter is not known

    def _named(self, known: Collection[Tensor]) -> list[NamedParameter]:
        """Return the parameters that the optimizer holds besides the `known` ones."""
        found: list[NamedParameter] = []
        for g, group in enumerate(self._optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if parameter in known:
                    continue
                if not isinstance(parameter, Tensor):
                    raise ValueError(f"parameter {i} of group {g} is {shown(parameter)}; put tensors alone there")
                name = self._names.get(parameter, f"group {g}, parameter {i}")
                require_dense_floats(name, parameter, "leave it out of the optimizer")
                if hasattr(parameter, MASTER_MARK):
                    raise ValueError(
                        f"{name} is a float32 master that an earlier DistributedOptimizer has put in the place of a "
                        "parameter; make a new torch optimizer of the model's parameters"
                    )
                if parameter.numel():
                    found.append(NamedParameter(name, parameter))
        members = (*self.trained, *self.waiting, *found)
        name, times = Counter(member.name for member in members).most_common(1)[0] if members else ("", 1)
        if times > 1:
            raise ValueError(
                f"{times} parameters are called {name!r}; give each a name of its own, as in "
                "[(f'encoder.{name}', parameter) for name, parameter in encoder.named_parameters()]"
            )
        return found

    @property
    def places(self) -> str:
        """Fingerprint of the groups in which the optimizer holds the synchronized parameters."""
        if not self._places:
            names = {self._masters.get(one.parameter, one.parameter): one.name for one in self.trained}
            groups = [
                sorted(names[one] for one in group["params"] if one in names) for group in self._optimizer.param_groups
            ]
            self._places = f"#{fingerprint(str(groups)):x}"
        return self._places

    @property
    def held(self) -> list[Tensor]:
        """The parameters that the optimizer holds, in its order."""
        return [one for one in _held(self._optimizer) if one is not ...]

    @property
    def names_in_order(self) -> list[str]:
        """Names of the parameters that the optimizer holds, masters by those of their parameters."""
        given = {master: parameter for parameter, master in self._masters.items()}
        return [self._names.get(given.get(one, one), "") for one in self.held]

    def hold(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Record the parameters that the optimizer holds now, with `masters` in the place of some."""
        self._masters, self._places = masters, ""
        self._held = _held(self._optimizer)

    def name(self, names: Mapping[Tensor, str]) -> None:
        """Give names to parameters that are to be added."""
        self._names.update(names)

    def find_joining(self) -> list[NamedParameter]:
        """Return the parameters that require a gradient and wait.

        Raises
        ------
        ValueError
            As of this class, about parameters that were added; or the optimizer has lost one that is synchronized.
        """
        held = _held(self._optimizer)
        if len(held) != len(self._held) or any(map(is_not, held, self._held)):
            self._compare_with(held)
        return [member for member in self.waiting if member.parameter.requires_grad]

    def _compare_with(self, held: list[Any]) -> None:
        now = set(held)
        for member in self.trained:
            if self._masters.get(member.parameter, member.parameter) not in now:
                raise ValueError(
                    f"the torch optimizer no longer holds parameter {member.name!r}, which is synchronized; make both "
                    "optimizers again, or freeze a parameter that is not to be trained by requires_grad_(False)"
                )
        kept = [one for one in self.waiting if self._masters.get(one.parameter, one.parameter) in now]
        before, self.waiting = self.waiting, kept
        try:
            self.waiting = kept + self._named(set(self._held))
        except ValueError:
            self.waiting = before
            raise
        self._held, self._places = held, ""

    def join(self, members: Sequence[NamedParameter]) -> None:
        """Count these of the waiting parameters among the synchronized ones from now on."""
        names = {member.name for member in members}
        joined = [member for member in self.waiting if member.name in names]
        self.waiting = [member for member in self.waiting if member.name not in names]
        self.trained += joined  # the same list, which others hold
        self._places = ""
        self._forms += [_form(member.parameter) for member in joined]

    def find_frozen(self) -> list[NamedParameter]:
        """Return the synchronized parameters that require no gradient any more."""
        return [member for member in self.trained if not member.parameter.requires_grad]

    def find_change(self) -> str:
        """Return a parameter's change of form since it was first synchronized, and its cure; or an empty string."""
        for member, form in zip(self.trained, self._forms, strict=True):
            parameter = member.parameter
            # without a tuple for each of many parameters in each step
            if parameter.shape != form[0] or parameter.dtype is not form[1] or parameter.device != form[2]:
                now = _form(parameter)
                was, now_is = (f"{dtype}{list(shape)} on {device}" for shape, dtype, device in (form, now))
                return (
                    f"parameter {member.name!r} was {was} when the distributed optimizer was made, and is {now_is} "
                    "now; make both optimizers again once the model has its final form"
                )
        return ""


def _names_in(optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the names in the groups of an optimizer that was made of named parameters; none if two are equal."""
    both = [(group.get("param_names", ()), group["params"]) for group in optimizer.param_groups]
    # a list that was changed in place does not fit its names
    fitting = [(names, ones) for names, ones in both if isinstance(ones, list) and len(names) == len(ones)]
    pairs = [pair for names, ones in fitting for pair in zip(names, ones, strict=True)]
    return {parameter: name for name, parameter in pairs} if len({name for name, _ in pairs}) == len(pairs) else {}


def _held(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters that an optimizer holds, with a mark at the end of each group."""
    for group in optimizer.param_groups:
        if isinstance(group["params"], Iterator):  # such as model.parameters(), which one reader would use up
            group["params"] = [*group["params"]]
    return [one for group in optimizer.param_groups for one in (*group["params"], ...)]


def _form(parameter: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return parameter.shape, parameter.dtype, parameter.device


def require_dense_floats(name: str, parameter: Tensor, cure: str) -> None:
    """Raise ValueError, with the parameter's name, unless it is a dense floating-point tensor that can be reached."""
    require_reachable(f"parameter {name!r}", parameter)
    if not parameter.is_floating_point() or parameter.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} is a {parameter.layout} tensor of {parameter.dtype}; {cure}, since only dense "
            "float16, bfloat16, float32 and float64 can be synchronized"
        )


def require_own_gradients(name: str, parameter: Tensor, cure: str) -> None:
    """Raise ValueError, with the parameter's name, unless its gradients are of its own type, in which they travel."""
    found = getattr(parameter, "grad_dtype", None) or parameter.dtype  # None: of any type, and PyTorch < 2.10 lacks it
    if parameter.grad is not None:
        found = parameter.grad.dtype
    if found != parameter.dtype:
        raise ValueError(
            f"parameter {name!r} is of {parameter.dtype} and its gradient of {found}; gradients are averaged in the "
            f"type of their parameter alone: let parameter.grad_dtype be parameter.dtype{cure}"
        )
