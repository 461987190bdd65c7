"""PyTorch's ``test/distributed/test_c10d_*.py`` of a source tree, run in place on ranks that MPI has started.

These tests start processes of their own, one per rank; here the ranks are there already, and each runs the body of a
test. A test that wants fewer ranks than there are runs on the first ones. Where a test makes a group of Gloo, or asks
`torch.distributed` for one, it gets one of "mpicomp".
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import unittest
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import set_rng_seed

from mpicomp.torch.process_group import MPIProcessGroup

FILES = (
    "test_c10d_common",
    "test_c10d_gloo",
    "test_c10d_object_collectives",
    "test_c10d_pypg",
    "test_c10d_spawn_gloo",
)
REMOVED = {"torch.distributed._spmd": (), "torch.distributed._spmd.comm_tensor": ("CommTensor", "_wait_comm")}
"""What files of older sources import and the installed PyTorch has no more; tests that use it cannot pass."""
CODES = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
COMM = MPI.COMM_WORLD


class Options:
    """Options of a group of Gloo that tests set."""

    def __init__(self) -> None:
        self._timeout: Any = timedelta(seconds=50)
        self._devices: list[Any] = []
        self._threads = 2


class StandIn(MPIProcessGroup):
    """Our process group, made as one of Gloo is."""

    _Options = Options
    made = 0

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any = None, **named: Any) -> None:
        timeout = named.get("timeout", getattr(options, "_timeout", options))
        seconds = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout or 50.0)
        super().__init__(store, rank, size, seconds, "stand-in")
        self.options = SimpleNamespace(_timeout=seconds)

    @staticmethod
    def create_device(**_: Any) -> None:
        """Gloo's groups have devices; ours have none."""

    create_default_device = create_device


def stand_in() -> None:
    """Have "mpicomp" made wherever Gloo would be."""
    distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo = StandIn


def names(source: Path) -> list[str]:
    """All tests of the files, as file.Class.test."""
    sys.path.insert(0, str(source / "test" / "distributed"))
    if importlib.util.find_spec("torch.distributed._spmd") is None:
        for module_name, values in REMOVED.items():
            gone = sys.modules[module_name] = ModuleType(module_name)
            vars(gone).update(dict.fromkeys(values))
    found: list[str] = []
    for file in FILES:
        if not (source / "test" / "distributed" / f"{file}.py").exists():
            continue
        module = importlib.import_module(file)
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == file]
        found += [
            f"{file}.{kind.__name__}.{test}"
            for kind in kinds
            if issubclass(kind, unittest.TestCase)
            for test in unittest.defaultTestLoader.getTestCaseNames(kind)
        ]
    return sorted(set(found))


def run(name: str, folder: Path) -> None:
    """Run one test on this rank, if it takes part; raise the test's error."""
    file, kind, method = name.split(".")
    case: Any = getattr(sys.modules[file], kind)(method)
    several = isinstance(case, MultiProcessTestCase)
    size = case.world_size if several else 1
    if size > COMM.size:
        raise unittest.SkipTest(f"needs {size} ranks")
    if COMM.rank >= size:
        return
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(size), str(COMM.rank)
    set_rng_seed()
    case._spawn_processes = lambda: None  # the ranks are there
    try:
        if several:
            case.rank, case.file_name = COMM.rank, str(folder / "init_dir" / name)
            if "seed" in vars(case):
                case.seed = 0
            getattr(case, method)()
        else:
            case.setUp()
            getattr(case, method)()
            case.tearDown()
    finally:
        os.environ.pop("WORLD_SIZE", None)
        os.environ.pop("RANK", None)
