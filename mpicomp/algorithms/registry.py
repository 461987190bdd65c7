"""Table of methods by their command-line names: those of this library, and those of installed packages."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

from collectives.quoting import suggestion
from mpicomp import contrib
from mpicomp.aggregator.algorithm import Algorithm
from mpicomp.aggregator.registration import REGISTERED
from mpicomp.algorithms import (  # noqa: F401 - which registers them
    dense,
    double_squeeze,
    ef_signsgd,
    local_top_k,
    marsit,
    power_sgd,
    qsgd,
    relay,
    scalecom,
    sparse_loco,
)

FIRST = ("dense", "marsit", "relay")
"""Methods that lists begin with."""
ENTRY_POINTS = "mpicomp.methods"
"""Group of the entry points by which other packages bring methods: each names a module that registers some."""


for _module in iter_modules(contrib.__path__):
    import_module(f"{contrib.__name__}.{_module.name}")

ALGORITHMS: dict[str, type[Algorithm]] = {}
"""Class of the options of each method, by its name on command lines. `Auto` chooses between two, and has no entry."""


def list_methods() -> None:
    """Fill `ALGORITHMS` by all methods that are registered, those of other packages included.

    A package of which a module cannot be imported is a warning: this program may not need it.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 - whatever another package raises while it is imported
            package = point.dist.name if point.dist else point.value
            cause = f"{type(error).__name__}: {error}"
            warnings.warn(f"the methods of {package} ({point.value}) are missing: {cause}", stacklevel=2)
    ordered = [*FIRST, *sorted(REGISTERED.keys() - {*FIRST})]
    ALGORITHMS.update((name, REGISTERED[name].kind) for name in ordered)


def method(name: str, **options: Any) -> Algorithm:
    """Return one of `ALGORITHMS` by its command-line name; raises the errors of `mpicomp.algorithm`."""
    require_name(name, ALGORITHMS)
    return ALGORITHMS[name](**options)


def require_name(name: str, names: Collection[str]) -> None:
    """Raise ValueError unless `name` is one of `names`."""
    if name not in names:
        raise ValueError(f"there is no algorithm {name!r}{suggestion(name, names)}: choose one of {', '.join(names)}")
