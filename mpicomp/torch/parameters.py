"""Which of an optimizer's parameters are synchronized: those that require a gradient at first, for good."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from collectives import Communicator
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.replication import require_cpu


class Parameters:
    """An optimizer's parameters, in its order, those without elements left out.

    Parameters
    ----------
    optimizer
        Its parameters are looked at, not changed.
    names
        What error messages call them; the others are called by their position.

    Attributes
    ----------
    trained, frozen
        Parameters that required a gradient, and those that did not.

    Raises
    ------
    ValueError
        A parameter is not a dense floating-point CPU tensor, or none is to be trained.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        self.trained: list[NamedParameter] = []
        self.frozen: list[NamedParameter] = []
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                name = names.get(parameter, f"group {g}, parameter {i}")
                require_dense_floats(name, parameter, "leave it out of the optimizer")
                if parameter.numel():
                    chosen = self.trained if parameter.requires_grad else self.frozen
                    chosen.append(NamedParameter(name, parameter))
        if not self.trained:
            raise ValueError(
                "the optimizer holds no parameter that requires a gradient; nothing is left to synchronize"
            )

    def require_unchanged(self, comm: Communicator) -> None:
        """Refuse to go on if a parameter was frozen or unfrozen since; without communication if none was.

        Raises
        ------
        ValueError
            Names the parameter; the other ranks get CollectiveMismatch.
        """
        problem = ""
        for member in self.frozen:
            if member.parameter.requires_grad:
                problem = (
                    f"parameter {member.name!r} was frozen when the distributed optimizer was made, so nothing "
                    "synchronizes it; unfreeze it before that"
                )
        for member in self.trained:
            if not member.parameter.requires_grad:
                problem = (
                    f"parameter {member.name!r} was frozen after the distributed optimizer was made, which would go on "
                    "moving it; freeze it before that"
                )
        if problem:
            comm.reject(ValueError(f"rank {comm.rank} of {comm.size}: {problem}"), "an optimizer step")


def require_dense_floats(name: str, parameter: Tensor, cure: str) -> None:
    """Raise ValueError, with the parameter's name, unless it is a dense floating-point tensor in host memory."""
    require_cpu(name, parameter)
    if not parameter.is_floating_point() or parameter.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} is a {parameter.layout} tensor of {parameter.dtype}; {cure}, since only dense "
            "float16, bfloat16, float32 and float64 can be synchronized"
        )
