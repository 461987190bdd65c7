"""Methods of other packages are found by their entry points, and a method is registered once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import mpicomp
from mpicomp.aggregator.registration import REGISTERED, method
from mpicomp.algorithms import ALGORITHMS
from mpicomp.cli.advise.report import METHODS
from mpicomp.cli.warm import FORMS
from tests.documents import PROJECT

MODULE = """
from dataclasses import dataclass
import mpicomp
from mpicomp.aggregator.registration import method

@method("coarse", forms=({"levels": 3},))
@dataclass(frozen=True)
class Coarse(mpicomp.QSGD):
    levels: int = 1
"""
PROGRAM = """
import mpicomp
from mpicomp.cli.advise.report import METHODS
from mpicomp.cli.warm import FORMS
print(mpicomp.algorithm("coarse", bucket=64), "coarse" in METHODS, any(type(one).__name__ == "Coarse" for one in FORMS))
"""


def run_with_package(folder: Path, module: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where a package is installed that brings a method by its entry point."""
    (folder / "coarse_methods.py").write_text(module)
    info = folder / "coarse_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coarse-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mpicomp.methods]\ncoarse = coarse_methods\n")
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{folder}"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_package_brings_a_method_to_every_command(tmp_path: Path) -> None:
    done = run_with_package(tmp_path, MODULE, PROGRAM)
    assert done.returncode == 0, done.stderr
    expected = "Coarse(levels=1, bucket=64, norm='linf', seed=0, coding='fixed', correlated=False) True True"
    assert done.stdout.strip() == expected


def test_a_package_that_cannot_be_imported_is_a_warning_that_names_it(tmp_path: Path) -> None:
    program = "import mpicomp; print(mpicomp.algorithm('qsgd').levels)"
    done = run_with_package(tmp_path, "import no_such_package", program)
    assert done.returncode == 0, done.stderr
    cause = "ModuleNotFoundError: No module named 'no_such_package'"
    assert f"the methods of coarse-methods (coarse_methods) are missing: {cause}" in done.stderr


def test_two_classes_cannot_have_one_name() -> None:
    with pytest.raises(
        ValueError, match=r"Other has the name of mpicomp\.algorithms\.qsgd\.QSGD .*'qsgd': register it"
    ):

        @method("qsgd")
        @dataclass(frozen=True)
        class Other(mpicomp.QSGD):
            pass

    assert REGISTERED["qsgd"].kind is mpicomp.QSGD


def test_every_method_is_registered_with_forms_that_can_be_made() -> None:
    assert {*REGISTERED} == {*ALGORITHMS}
    assert {type(one) for one in FORMS} >= {*ALGORITHMS.values()}
    assert {type(one) for one in METHODS.values()} <= {*ALGORITHMS.values()}
