"""Which of an optimizer's parameters are synchronized: those that require a gradient at first, for good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import is_not

import torch
from torch import Tensor

from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.devices import require_reachable
from mpicomp.torch.master_weights import is_master


class Parameters:
    """An optimizer's parameters, in its order, those without elements left out.

    Parameters
    ----------
    optimizer
        Its parameters are looked at, not changed.
    names
        Names for error messages; parameters without a name are called by their position.
    here
        This rank, for messages.

    Attributes
    ----------
    trained, frozen
        Parameters that required a gradient, and those that did not.

    Raises
    ------
    ValueError
        A parameter is not a dense floating-point tensor on the CPU or a GPU, two have one name, or none is to be
        trained.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], here: str) -> None:
        self._here = here
        self.trained: list[NamedParameter] = []
        self.frozen: list[NamedParameter] = []
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                name = names.get(parameter, f"group {g}, parameter {i}")
                require_dense_floats(name, parameter, "leave it out of the optimizer")
                if is_master(parameter):
                    raise ValueError(
                        f"{name} is a float32 master that an earlier DistributedOptimizer has put in the place of a "
                        "parameter; make a new torch optimizer of the model's parameters"
                    )
                if parameter.numel():
                    chosen = self.trained if parameter.requires_grad else self.frozen
                    chosen.append(NamedParameter(name, parameter))
        if not self.trained:
            raise ValueError(
                "the optimizer holds no parameter that requires a gradient; nothing is left to synchronize"
            )
        name, times = Counter(member.name for member in (*self.trained, *self.frozen)).most_common(1)[0]
        if times > 1:
            raise ValueError(
                f"{times} parameters are called {name!r}; give each a name of its own, as in "
                "[(f'encoder.{name}', parameter) for name, parameter in encoder.named_parameters()]"
            )
        self._forms = [_form(member.parameter) for member in self.trained]

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of what the optimizer holds now, which may be masters in the place of parameters."""
        self._held = _held(optimizer)

    def find_change(self, optimizer: torch.optim.Optimizer) -> ValueError | None:
        """Return the error for an optimizer or a parameter that was changed since; it names the parameter.

        Without communication.
        """
        problem = self._change(_held(optimizer))
        return ValueError(f"{self._here}: {problem}") if problem else None

    def _change(self, held: list[Tensor]) -> str:
        """What was changed, and the cure; nothing if nothing was."""
        if len(held) != len(self._held) or any(map(is_not, held, self._held)):
            return (
                "the torch optimizer holds other parameters than when the distributed optimizer was made, which does "
                "not synchronize them; make both anew"
            )
        for member in self.frozen:
            if member.parameter.requires_grad:
                return (
                    f"parameter {member.name!r} was frozen when the distributed optimizer was made, so nothing "
                    "synchronizes it; unfreeze it before that"
                )
        for member, form in zip(self.trained, self._forms, strict=True):
            if not member.parameter.requires_grad:
                return (
                    f"parameter {member.name!r} was frozen after the distributed optimizer was made, which would go on "
                    "moving it; freeze it before that"
                )
            now = _form(member.parameter)
            if now != form:
                was, now_is = (f"{dtype}{list(shape)} on {device}" for shape, dtype, device in (form, now))
                return (
                    f"parameter {member.name!r} was {was} when the distributed optimizer was made, and is {now_is} "
                    "now; make both optimizers anew once the model is as it shall be"
                )
        return ""


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
