"""Which algorithm averages which parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from collectives.quoting import one_line
from mpicomp.algorithms import Algorithm, Dense
from mpicomp.torch.buckets import NamedParameter

AlgorithmChoice = Algorithm | Mapping[str, Algorithm] | Callable[[str, Tensor], Algorithm]
"""One for all parameters; by patterns of names, of which the first that fits counts; or by name and parameter."""


def algorithms_by_name(choice: AlgorithmChoice, members: Sequence[NamedParameter]) -> dict[str, Algorithm]:
    """The algorithm of each parameter.

    Raises
    ------
    ValueError
        No pattern fits a parameter, or what was chosen for it is no algorithm.
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
    return found


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
    """What the algorithms prefer, "updates" or "gradients"; full precision takes part in either.

    Raises
    ------
    ValueError
        They differ.
    """
    modes = {one.synchronize: one for one in algorithms.values() if not isinstance(one, Dense)}
    if len(modes) > 1:
        differing = " and ".join(f'{one} "{mode}"' for mode, one in modes.items())
        raise ValueError(
            f'the algorithms differ in what they prefer ({differing}); pass synchronize="gradients" or "updates"'
        )
    return next(iter(modes), "gradients")
