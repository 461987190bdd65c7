"""Registration of methods: the decorator that makes a dataclass of options a method with a name on command lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from mpicomp.aggregator.algorithm import Algorithm

Kind = TypeVar("Kind", bound=type[Algorithm])
Options = Mapping[str, Any]


class Grade(IntEnum):
    """Learning record of a method in trainings; a lower grade is better."""

    AS_DENSE = 1  # where exact means of the same steps end, in each of many trainings, with momentum and Adam too
    PROMISING = 2  # near dense in most trainings, or in the few that were tried
    BEHIND = 3  # more than a point behind dense, or clearly above its loss, in a training of a usual kind
    COMPARED = 4  # for comparison only: behind, or never the best choice


class Learned(NamedTuple):
    """A grade, and its reason, as the end of a sentence that begins with the method."""

    grade: Grade
    experience: str


UNTRIED = Learned(Grade.COMPARED, "has no recorded training yet")


class Advised(NamedTuple):
    """Options with a name of their own in the advice, and their learning record."""

    options: Options
    learned: Learned


@dataclass(frozen=True)
class Registration:
    """A method as command lines, advice, and the compilation of kernels need it.

    Attributes
    ----------
    forms : sequence of Options
        Forms that call different kernels.
    advised : mapping of str to Advised
        Forms that ``mpicomp advise`` compares with dense sums, by their names there.
    """

    name: str
    kind: type[Algorithm]
    forms: Sequence[Options] = ({},)
    advised: Mapping[str, Advised] = field(default_factory=dict)


REGISTERED: dict[str, Registration] = {}
"""By names on command lines, in the order of registration."""


def method(
    name: str,
    learned: Learned = UNTRIED,
    forms: Sequence[Options] = ({},),
    advised: Mapping[str, Advised] | None = None,
) -> Callable[[Kind], Kind]:
    """Return a decorator that registers a dataclass of options as a method.

    Parameters
    ----------
    name : str
        On command lines: of small letters, digits and hyphens.
    learned : Learned
        Learning record of the default options.
    forms : sequence of dict
        Options of each form that calls other kernels, which ``mpicomp warm`` compiles.
    advised : mapping of str to Advised, optional
        Forms that ``mpicomp advise`` compares; None: the default options, under `name`.

    Returns
    -------
    callable
        It returns the class that it registers.

    Raises
    ------
    ValueError
        Another class has this name.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import mpicomp
    >>> from mpicomp.aggregator.registration import REGISTERED, method
    >>> @method("coarse")
    ... @dataclass(frozen=True)
    ... class Coarse(mpicomp.QSGD):
    ...     levels: int = 1
    >>> REGISTERED.pop("coarse").kind()
    Coarse(levels=1, bucket=512, norm='linf', seed=0, coding='fixed', correlated=False)
    """

    def register(kind: Kind) -> Kind:
        known = REGISTERED.get(name)
        if known is not None and (known.kind.__module__, known.kind.__qualname__) != (
            kind.__module__,
            kind.__qualname__,
        ):
            raise ValueError(
                f"{kind.__module__}.{kind.__qualname__} has the name of {known.kind.__module__}."
                f"{known.kind.__qualname__} on command lines, {name!r}: register it by another"
            )
        advice = {name: Advised({}, learned)} if advised is None else advised
        REGISTERED[name] = Registration(name, kind, forms, advice)
        return kind

    return register
