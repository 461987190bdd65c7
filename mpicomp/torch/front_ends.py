"""Arguments that the optimizers and the hooks share, checked before anything is made of them."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.caller_warning import warn_caller
from collectives.errors import marked
from collectives.quoting import nearest, one_line
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.algorithms import NAMES, Algorithm, Dense, PerNode
from mpicomp.torch.parameters import NamedParameter

AlgorithmChoice = Algorithm | Mapping[str, Algorithm] | Callable[[str, Tensor], Algorithm]
"""One for all parameters; by patterns of names, of which the first that fits counts; or by name and parameter."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_USAGE = "DistributedOptimizer(optimizer, algorithm, comm, named_parameters)"


# Algorithms of parameters ---------------------------------------------------------------------------------------------


def algorithms_by_name(
    choice: AlgorithmChoice, members: Sequence[NamedParameter], of_gradients: bool = True
) -> dict[str, Algorithm]:
    """Return the algorithm of each parameter, with its defaults for gradients unless these are not averaged.

    Raises
    ------
    ValueError
        No pattern fits a parameter, or its choice is not an algorithm.
    """
    found = {member.name: _choose(choice, member) for member in members}
    for name, algorithm in found.items():
        if not isinstance(algorithm, Algorithm):
            raise ValueError(
                f"the algorithm of {name!r} is {algorithm!r}; choose an instance, such as mpicomp.Marsit() or "
                'mpicomp.algorithm("marsit")'
            )
        if getattr(getattr(algorithm, "compressing", algorithm), "rates", None) is not None:
            raise ValueError(
                "rates by position do not fit buckets that are laid out by the order of gradients; choose by "
                "parameter: algorithm=lambda name, parameter: mpicomp.ScaleCom(rate=rates[name])"
            )
    return {name: one.of_gradients() for name, one in found.items()} if of_gradients else found


def _choose(choice: AlgorithmChoice, member: NamedParameter) -> Algorithm:
    if isinstance(choice, Algorithm):
        return choice
    if isinstance(choice, Mapping):
        for pattern, algorithm in choice.items():
            if fnmatchcase(member.name, str(pattern)):
                return algorithm
        raise ValueError(
            f"no pattern among {', '.join(map(repr, choice))} fits {member.name!r}; end the choices with '*'"
        )
    try:
        return choice(member.name, member.parameter)
    except Exception as error:  # of the user's function
        raise ValueError(
            f"no algorithm is chosen for {member.name!r} ({type(error).__name__}: {one_line(error)}); pass a function "
            "of name and parameter that returns one for each"
        ) from error


def preferred_mode(algorithms: Mapping[str, Algorithm]) -> str:
    """Return the mode that the algorithms prefer, "updates" or "gradients"; full precision takes part in either.

    Raises
    ------
    ValueError
        They differ.
    """
    modes = {one.synchronize: one for one in algorithms.values() if not _is_dense(one)}
    if len(modes) > 1:
        differing = " and ".join(f'{one} "{mode}"' for mode, one in modes.items())
        raise ValueError(
            f'the algorithms differ in what they prefer ({differing}); pass synchronize="gradients" or "updates"'
        )
    return next(iter(modes), "gradients")


def _is_dense(algorithm: Algorithm) -> bool:
    return isinstance(getattr(algorithm, "method", algorithm), Dense)


def with_seed(choice: AlgorithmChoice, place: int) -> AlgorithmChoice:
    """Return the choice with seeds that are larger by `place`: models of one communicator draw other numbers."""
    if place == 0:
        return choice
    if isinstance(choice, Mapping):
        return {pattern: _seeded(algorithm, place) for pattern, algorithm in choice.items()}
    if isinstance(choice, Algorithm):
        return _seeded(choice, place)
    return lambda name, parameter: _seeded(choice(name, parameter), place)


def _seeded(algorithm: Algorithm, place: int) -> Algorithm:
    if not is_dataclass(algorithm):
        return algorithm
    changed: dict[str, Any] = {}
    for field in fields(algorithm):
        value = getattr(algorithm, field.name)
        if field.name == "seed":
            changed["seed"] = value + place
        elif isinstance(value, Algorithm):  # that `Auto` switches to
            changed[field.name] = _seeded(value, place)
    return replace(algorithm, **changed)


# Types of arguments ---------------------------------------------------------------------------------------------------


def given_communicator(comm: Communicator | None, call: str, *others: object) -> Communicator:
    """Return the communicator, or a new one of all ranks for None; raise TypeError, which names the call, otherwise."""
    if comm is None:
        return Communicator()
    require_communicator(comm, call, _USAGE, *others)
    return comm


def explain_missing_algorithm(initialize: _Function) -> _Function:
    """Return an initializer that names the call where there is no algorithm, as in programs for Horovod."""

    @functools.wraps(initialize)
    def run(self: object, *args: Any, **kwargs: Any) -> None:
        if len(args) < 2 and "algorithm" not in kwargs:
            raise marked(TypeError(f"the algorithm is missing, such as mpicomp.Relay(): write {_USAGE}"))
        initialize(self, *args, **kwargs)

    return cast(_Function, run)


def warn_of_ddp(members: Sequence[NamedParameter], algorithms: Iterable[Algorithm], comm: Communicator) -> None:
    """Warn on rank 0 if DistributedDataParallel also averages these parameters over as many ranks.

    Under PerNode it may do so within the node, which has all ranks where a program for several nodes runs on one.
    Parameters do not refer to the wrapper, so it is searched for where PyTorch has the process group that it needs.
    """
    if comm.rank or comm.size == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    if len(comm.layout.sizes) == 1 and all(isinstance(one, PerNode) for one in algorithms):
        return
    ours = {id(member.parameter) for member in members}
    for wrapper in [one for one in gc.get_objects() if type(one) is DistributedDataParallel]:
        averages = wrapper.process_group.size() == comm.size and not getattr(wrapper, "_comm_hooks", ())
        if averages and not ours.isdisjoint(map(id, wrapper.parameters())):
            warn_caller(
                f"{comm.here}: DistributedDataParallel also sends every gradient, uncompressed: train "
                "the model without it (ddp.module), or keep it with a plain optimizer and mpicomp.torch.ddp_hook",
                UserWarning,
            )
            return


def require_optimizer(optimizer: object, algorithm: object) -> None:
    """Raise TypeError unless the arguments are an optimizer and an algorithm, or a choice of algorithms."""
    if isinstance(optimizer, Algorithm) or hasattr(algorithm, "param_groups"):
        raise TypeError(f"the optimizer comes before the algorithm: write {_USAGE}")
    require_torch_optimizer(optimizer)
    require_algorithm(algorithm)


def require_torch_optimizer(optimizer: object) -> None:
    """Raise TypeError unless the argument is an instance of a torch optimizer."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        given = (
            f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"of type {type(optimizer).__name__}"
        )
        raise TypeError(
            f"the optimizer is {given}: pass an instance of a torch optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )


def require_algorithm(algorithm: object) -> None:
    """Raise TypeError unless the argument is an algorithm, or a choice of algorithms by parameter."""
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


def require_bucket_size(bucket_mb: object) -> None:
    """Raise ValueError unless the argument is a positive number."""
    if not isinstance(bucket_mb, int | float) or not bucket_mb > 0:
        raise ValueError(f"bucket_mb is {bucket_mb!r}; a bucket needs a positive size")


def names_by_parameter(
    named_parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None,
) -> dict[Tensor, str]:
    """Return the name of each parameter; raise TypeError unless all have names."""
    if named_parameters is None:
        return {}
    cure = "pass model.named_parameters()"
    if inspect.ismethod(named_parameters):
        raise TypeError(f"named_parameters is a method: {cure}, with the parentheses")
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
