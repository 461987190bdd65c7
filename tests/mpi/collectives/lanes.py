"""How many ranks a test runs on, and the topologies it runs over."""

from __future__ import annotations

import pytest

from collectives import Torus
from collectives.plan import Topology
from collectives.topologies import TOPOLOGIES

# Sizes that powers of two hide, tried as parts of a lane of at least this many ranks.
PARTS = (5, 7)
PARTS_FROM = 8


def parametrize_sizes(metafunc: pytest.Metafunc) -> None:
    """Run every test that asks for `mpi_comm` on the whole lane, and in the widest lane on 5 and 7 ranks too."""
    if "mpi_comm" not in metafunc.fixturenames or any(m.args[0] == "mpi_comm" for m in _parametrized(metafunc)):
        return
    plugin = metafunc.config.pluginmanager.get_plugin("rank_agreement")
    size = 1 if plugin is None else plugin.size
    metafunc.parametrize("mpi_comm", [size, *(PARTS if size >= PARTS_FROM else ())], indirect=True)


def _parametrized(metafunc: pytest.Metafunc) -> list[pytest.Mark]:
    return list(metafunc.definition.iter_markers("parametrize"))


def topologies(size: int) -> list[Topology]:
    """Every topology that fits, with its defaults; tori in all shapes of two rows or columns and more."""
    tori: list[Topology] = [Torus(rows, size // rows) for rows in range(2, size // 2 + 1) if size % rows == 0]
    return [make() for make in TOPOLOGIES.values()] + [torus for torus in tori if torus != Torus()]
