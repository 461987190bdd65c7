"""Modules for frameworks, where the framework is missing."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("module", "cure"),
    [
        ("lightning", "mpicomp.lightning needs PyTorch Lightning (.*): pip install lightning"),
        ("accelerate", "mpicomp.accelerate needs Accelerate (.*): pip install accelerate"),
        ("transformers", "mpicomp.transformers needs Transformers (.*): pip install transformers"),
    ],
)
def test_the_error_has_the_command_that_installs_it(module: str, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"mpicomp.{module}", raising=False)
    with pytest.raises(ImportError, match=cure.replace("(", r"\(").replace(")", r"\)")):
        import_module(f"mpicomp.{module}")
