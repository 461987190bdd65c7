"""What optimizers of this package are given, looked at before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from collectives import Communicator
from collectives.quoting import nearest
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.algorithms import NAMES, Algorithm

_USAGE = "DistributedOptimizer(optimizer, algorithm, comm, named_parameters)"


def communicator(comm: Communicator | None, call: str, *others: Any) -> Communicator:
    """The communicator, or one of all ranks in place of None; TypeError, which names the call, if it is neither."""
    if comm is None:
        return Communicator()
    require_communicator(comm, call, _USAGE, *others)
    return comm


def require_optimizer(optimizer: Any, algorithm: Any) -> None:
    """Raise TypeError unless these are an optimizer and a method, or what chooses methods by parameter."""
    if isinstance(optimizer, Algorithm) or hasattr(algorithm, "param_groups"):
        raise TypeError(f"the optimizer comes before the algorithm: write {_USAGE}")
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        given = (
            f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"of type {type(optimizer).__name__}"
        )
        raise TypeError(
            f"the optimizer is {given}: pass an instance of a torch optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    require_algorithm(algorithm)


def require_algorithm(algorithm: Any) -> None:
    """Raise TypeError unless this is a method, or what chooses methods by parameter."""
    if isinstance(algorithm, str):
        name = algorithm if algorithm in NAMES else nearest(algorithm, NAMES) or "marsit"
        raise TypeError(f"the algorithm is text, {algorithm!r}: pass an instance, mpicomp.algorithm({name!r})")
    if isinstance(algorithm, Iterator) or (isinstance(algorithm, list | tuple) and algorithm):
        raise TypeError(
            f"the algorithm is a {type(algorithm).__name__}, as named parameters are, which come fourth: write {_USAGE}"
        )
    if isinstance(algorithm, type):
        raise TypeError(f"the algorithm is a class: write {algorithm.__name__}(), with parentheses")
    chosen_by = isinstance(algorithm, Mapping) or (callable(algorithm) and not isinstance(algorithm, torch.nn.Module))
    if not isinstance(algorithm, Algorithm) and not chosen_by:
        raise TypeError(f"the algorithm is of type {type(algorithm).__name__}: pass a method, such as mpicomp.Marsit()")


def names(named_parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """What each parameter is called; TypeError unless all have names."""
    if named_parameters is None:
        return {}
    cure = "pass model.named_parameters()"
    if isinstance(named_parameters, torch.nn.Module):
        raise TypeError(f"named_parameters is the model: {cure}")
    try:
        pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
        found = {}
        for pair in pairs:
            if isinstance(pair, Tensor):
                raise TypeError(f"named_parameters are tensors without names: {cure}, not model.parameters()")
            name, parameter = pair
            found[parameter] = str(name)
        return found
    except ValueError:
        raise TypeError(f"named_parameters are no pairs of name and tensor: {cure}") from None
