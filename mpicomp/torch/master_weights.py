"""Float32 masters of an optimizer's 16-bit parameters, and the gradients that they take from these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mpicomp.torch.parameters import MASTER_MARK, NARROW, NamedParameter

_Version: TypeAlias = tuple[Tensor | None, int]
"""A gradient, and PyTorch's count of its changes."""


def _versions(parameters: Iterable[Tensor]) -> list[_Version]:
    gradients = [parameter.grad for parameter in parameters]
    return [(one, 0 if one is None else one._version) for one in gradients]


def _are_same(now: Sequence[_Version], before: Sequence[_Version]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(one is other and v == then for (one, v), (other, then) in pairs)


class MasterWeights:
    """Float32 master copies of an optimizer's 16-bit parameters, which it holds in their place.

    An update is often smaller than half the spacing of 16-bit floats, so ``p - lr * g`` would round back to ``p`` and
    nothing would be left to average. The wrapped optimizer therefore moves float32 masters; the model holds them
    rounded.

    `optimizer.param_groups` is edited in place and the parameters' optimizer state, if any, moves to the masters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters: list[Tensor] = []  # the model's, of 16 bits
        self.masters: list[Tensor] = []
        self._taken: list[_Version] = []  # of the model's gradients
        self._given: list[_Version] = []  # of the masters' gradients; empty once a step has used them
        self.by_parameter: dict[Tensor, Tensor] = {}
        self.adopt(optimizer)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Put masters in the place of the 16-bit parameters that require a gradient and lack a master."""
        self._given = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype in NARROW and parameter.requires_grad:
                    master = torch.nn.Parameter(parameter.detach().float())
                    setattr(master, MASTER_MARK, True)
                    self.parameters.append(parameter)
                    self.masters.append(master)
                    self.by_parameter[parameter] = master
        self.replace_in(optimizer)

    def replace_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer hold the masters in place of their parameters."""
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                master = self.by_parameter.get(parameter)
                if master is None:
                    continue
                group["params"][i] = master
                if parameter in optimizer.state:
                    optimizer.state[master] = {
                        key: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
                        for key, value in optimizer.state.pop(parameter).items()
                    }

    def substitute(self, members: Sequence[NamedParameter]) -> list[NamedParameter]:
        """Return `members` with each 16-bit parameter replaced by its master, under its name."""
        return [NamedParameter(m.name, self.by_parameter.get(m.parameter, m.parameter)) for m in members]

    def take_gradients(self) -> None:
        """Give each master its parameter's gradient, in float32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        self._taken, self._given = _versions(self.parameters), _versions(self.masters)

    def show_gradients(self) -> None:
        """Give the masters the gradients that have come, for a caller who reads the optimizer's parameters."""
        if self.gradients_changed:
            self.take_gradients()

    def take_gradients_of_step(self) -> None:
        """Give the masters the gradients for a step, unless they have them, and a caller has changed them since.

        Raises
        ------
        RuntimeError
            The model's gradients have been changed after those of the masters, or added to.
        """
        is_edited = bool(self._given) and not _are_same(_versions(self.masters), self._given)
        if is_edited and not self.gradients_changed:
            self._given = []
            return
        pairs = zip(_versions(self.parameters), self._taken, strict=False)
        if is_edited and any(now is before and now is not None and v != then for (now, v), (before, then) in pairs):
            raise RuntimeError(
                "gradients of 16-bit parameters came or were changed after those of their float32 copies had been "
                "changed, by clipping for example: change the optimizer's parameters, "
                "[p for group in optimizer.param_groups for p in group['params']], after the last backward() alone"
            )
        self.take_gradients()
        self._given = []

    @property
    def gradients_changed(self) -> bool:
        """Flag: gradients of the model were changed after the masters had taken them, which then lack the change."""
        return not _are_same(_versions(self.parameters), self._taken)

    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the model's gradients; the masters' follow with the next `take_gradients`."""
        self._given = []
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over parameters that were written since `publish`, for instance by loading a model."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            unchanged = master.to(parameter.dtype) == parameter
            master.copy_(torch.where(unchanged, master, parameter.float()))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's parameters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
