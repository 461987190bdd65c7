"""Tests mirror the packages: the path of a module gives the path of its tests, and the path of a test its module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.documents import PROJECT

# Modules, or folders whose modules need no file of tests of their own, and a file that tests them together.
TOGETHER = {
    "collectives/arrays": "unit/collectives/arrays/test_device.py",
    "collectives/communicator": "unit/collectives/communicator/test_facade.py",
    "collectives/emulation": "unit/collectives/emulation/test_slow_link.py",
    "collectives/error_report.py": "unit/cli/run/test_output.py",
    "collectives/errors.py": "unit/test_readme.py",
    "collectives/group": "unit/collectives/communicator/test_facade.py",
    "collectives/listed_names.py": "unit/collectives/communicator/test_facade.py",
    "collectives/losses.py": "unit/faults/test_regroup.py",
    "collectives/network_probe.py": "mpi/cli/test_advise.py",
    "collectives/progress": "mpi/collectives/progress/test_thread.py",
    "collectives/quoting.py": "mpi/collectives/consistency/test_call_check.py",
    "collectives/recovery": "unit/faults/test_regroup.py",
    "collectives/threads": "unit/collectives/threads/test_run_local.py",
    "collectives/transports.py": "unit/collectives/emulation/test_slow_link.py",
    "mpicomp/algorithms": "mpi/algorithms/test_algorithms_exact.py",
    "mpicomp/contrib": "mpi/algorithms/test_algorithms_exact.py",
    "mpicomp/cli": "unit/cli/test_command.py",
    "mpicomp/feedback": "mpi/algorithms/test_algorithms_exact.py",
    "mpicomp/kernels": "unit/kernels/test_cache_folder.py",
    "mpicomp/pipeline": "mpi/pipeline/test_stage.py",
    "mpicomp/reducers": "mpi/algorithms/test_algorithms_exact.py",
    "mpicomp/recovery": "unit/faults/test_residual_copies.py",
    "mpicomp/aggregator/step.py": "mpi/algorithms/test_algorithms_exact.py",
    "mpicomp/spaces": "unit/feedback/test_error_feedback.py",
    "mpicomp/state": "unit/state/test_state_file.py",
    "mpicomp/torch": "mpi/torch/test_torch_compile.py",
}
# Tests of more than one package.
ACROSS = ("apps", "faults", "kernels/gpu")


def modules() -> list[Path]:
    """Return the modules of both packages, relative to the project."""
    found = (path for package in ("collectives", "mpicomp") for path in (PROJECT / package).rglob("*.py"))
    return sorted(path.relative_to(PROJECT) for path in found if not path.stem.startswith("__"))


def mirrored(folder: Path) -> Path:
    """Return the folder of tests of a package's folder: `mpicomp` itself has no folder there."""
    return folder.relative_to("mpicomp") if folder.is_relative_to("mpicomp") else folder


def names(module: Path) -> Iterator[tuple[Path, str]]:
    """Give each folder and name that tests of a module may have: its own, and those of the packages around it."""
    place = mirrored(module.parent)
    yield place, module.stem
    while place != Path():
        yield place, place.name
        yield place.parent, place.name
        place = place.parent


def files_of(place: Path, name: str) -> set[Path]:
    """Return ``test_NAME.py`` and ``test_NAME_TOPIC.py`` in a folder, with ranks and without."""
    folders = [PROJECT / "tests" / kind / place for kind in ("unit", "mpi")]
    return {path for folder in folders for pattern in ("", "_*") for path in folder.glob(f"test_{name}{pattern}.py")}


def test_a_module_has_tests_whose_path_a_reader_guesses() -> None:
    """Name them ``tests/unit/FOLDER/test_MODULE.py``, or add the folder to `TOGETHER`."""
    alone = [module for module in modules() if not any(module.is_relative_to(part) for part in TOGETHER)]
    assert [one for one in alone if not any(files_of(place, name) for place, name in names(one))] == []


def test_parts_that_are_tested_together_are_there() -> None:
    for part, file in TOGETHER.items():
        assert (PROJECT / part).exists(), part
        assert (PROJECT / "tests" / file).is_file(), file


def test_a_file_of_tests_names_a_module_or_a_package() -> None:
    known = {path for module in modules() for place, name in names(module) for path in files_of(place, name)}
    roots = [PROJECT / "tests" / kind for kind in ("unit", "mpi")]
    across = tuple(root / folder for root in roots for folder in ACROSS)
    files = [
        path for root in roots for path in root.glob("*/**/test_*.py") if not any(map(path.is_relative_to, across))
    ]
    assert [path for path in files if path not in known] == []
