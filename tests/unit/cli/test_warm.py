"""``mpicomp warm``: nothing is left to compile afterwards, and a second one has nothing to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp import Communicator, run_local
from mpicomp.aggregator import rehearsal
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.cli import warm
from mpicomp.cli.main import main
from mpicomp.kernels.cache_folder import CACHE
from mpicomp.kernels.cpu.kernel import _KernelCache
from tests.methods import METHODS


def test_a_warm_machine_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    present = {warm.WARM + dtype for dtype in warm.DTYPES}
    monkeypatch.setattr(CACHE, "has", present.__contains__)
    monkeypatch.setattr(warm, "warm_method", lambda form: pytest.fail("rehearsed again"))
    assert main(["warm"]) == 0
    assert capsys.readouterr().out.startswith("0 kernels compiled in 0 s, ")


def test_kernels_that_cannot_be_kept_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(CACHE, "has", lambda name: True)
    monkeypatch.setattr(CACHE, "problem", "/x takes no compiled kernels (Read-only file system)")
    assert main(["warm"]) == 1
    assert capsys.readouterr().err == "mpicomp warm: /x takes no compiled kernels (Read-only file system)\n"


@pytest.mark.timeout(600)  # where the machine is not warm
def test_every_method_finds_its_kernels_on_a_warm_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: list[str] = []
    load, marked = _KernelCache.load_overload, CACHE.has

    def spy(self: _KernelCache, sig: Any, target_context: Any) -> Any:
        found = load(self, sig, target_context)
        if found is None:
            missing.append(self.file_of(sig))
        return found

    for form in warm.FORMS:
        for ranks, n, topology in warm.ROUTES:
            rehearsal.rehearse(form, VectorSpec(n, "float32"), ranks, topology, with_moves=True)
    monkeypatch.setattr(_KernelCache, "load_overload", spy)
    monkeypatch.setattr(CACHE, "has", lambda name: name.startswith(warm.WARM) or marked(name))

    def steps(comm: Communicator, method: Any) -> None:
        aggregator = method.start(comm, 1000)
        for _ in range(3):
            aggregator.aggregate(np.full(1000, 1.0 + comm.rank, np.float32))

    for name, method in METHODS.items():
        run_local(2, lambda comm, method=method: steps(comm, method))
        assert not missing, f"{name} compiles {missing}"
