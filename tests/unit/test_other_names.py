"""Names that users of other libraries look for: the counterpart is in the message."""

from __future__ import annotations

import re
from typing import Any

import pytest

import collectives
import mpicomp
import mpicomp.torch
from mpicomp.other_names import COUNTERPARTS

NAMES = [
    (mpicomp, "init", "there is nothing to initialize: comm = mpicomp.Communicator()"),
    (mpicomp, "rank", "write comm.rank, where comm = mpicomp.Communicator()"),
    (mpicomp, "local_size", "write comm.local_size"),
    (mpicomp, "allreduce", "write comm.allreduce(x, op='mean')"),
    (mpicomp, "DistributedOptimizer", "from mpicomp.torch import DistributedOptimizer"),
    (mpicomp, "Compression", "mpicomp.Dense(wire='float16')"),
    (mpicomp, "Marsitt", "(did you mean 'Marsit'?)"),
    (mpicomp, "marsit", "(did you mean 'Marsit'?)"),
    (mpicomp, "local_rnk", "(did you mean 'local_rank'?)"),
    (mpicomp.torch, "init", "there is nothing to initialize"),
    (mpicomp.torch, "size", "write comm.size"),
    (mpicomp.torch, "average_bufers", "(did you mean 'average_buffers'?)"),
    (collectives, "Comunicator", "(did you mean 'Communicator'?)"),
]


@pytest.mark.parametrize(("module", "name", "told"), NAMES)
def test_a_name_of_another_library_is_told_its_counterpart(module: Any, name: str, told: str) -> None:
    with pytest.raises(
        AttributeError, match=f"^module '{module.__name__}' has no attribute '{name}'.*{re.escape(told)}"
    ):
        getattr(module, name)


def test_no_counterpart_is_a_name_of_the_package_and_all_that_are_named_exist() -> None:
    assert not COUNTERPARTS.keys() & {*mpicomp.__all__}
    for cure in COUNTERPARTS.values():
        for attribute in re.findall(r"\bcomm\.(\w+)", cure):
            assert hasattr(mpicomp.Communicator, attribute) or attribute in ("rank", "size", "local_rank", "local_size")
        for attribute in re.findall(r"mpicomp\.torch\.(\w+)", cure):
            assert hasattr(mpicomp.torch, attribute)
        for attribute in re.findall(r"mpicomp\.([A-Z]\w+)", cure):
            assert hasattr(mpicomp, attribute)


def test_a_young_method_without_a_name_in_the_package_is_made_by_its_name_on_command_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(mpicomp.ALGORITHMS, "young", type("Young", (), {}))
    with pytest.raises(AttributeError, match=r"no attribute 'Young': write mpicomp\.algorithm\('young'\)$"):
        mpicomp.Young  # noqa: B018


def test_names_that_nobody_means_are_plainly_missing() -> None:
    for name in ("xyzzy", "_private", "__path_hooks__"):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'$"):
            getattr(mpicomp, name)
