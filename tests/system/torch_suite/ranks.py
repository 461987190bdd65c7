"""One rank of the tests: runs one after the other in place, where PyTorch's harness would start processes.

``... ranks BACKEND PART FIRST RESULTS`` begins with test number FIRST of those whose name contains PART. A test that
fails ends the job, as it leaves process groups behind. With TORCH_SOURCE, a folder of PyTorch's sources, the tests are
those of ``source_tree.py``, and else those of the wheel.

The tests decide by the name of the backend what they try, and know Gloo's; so "mpicomp" runs under Gloo's name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import set_rng_seed
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import Barrier, DistributedTest, TestDistBackend

from mpicomp.torch.process_group import MPIProcessGroup
from tests.system.torch_suite import source_tree

SOURCE = os.environ.get("TORCH_SOURCE", "")
COMM = MPI.COMM_WORLD
CODES = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
FOLDER = Path(os.environ["TEMP_DIR"])


class GlooStandIn(MPIProcessGroup):
    """Our process group where `torch.distributed` makes one of Gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout, "stand-in")
        self.options = SimpleNamespace()


class Suite(DistributedTest._DistTestBase, TestDistBackend):
    """The tests."""


def prepare() -> None:
    """Empty the folder that the ranks share."""
    COMM.Barrier()
    if COMM.rank == 0:
        for name in ("barrier", "test_dir", "init_dir"):
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            (FOLDER / name).mkdir()
    COMM.Barrier()
    Barrier.barrier_id = 0


def run(name: str) -> tuple[str, str]:
    """Run one test on this rank: the verdict, and why."""
    try:
        if SOURCE:
            source_tree.run(name, FOLDER)
            return "passed", ""
        case = Suite(name)
        case.rank, case.file_name = COMM.rank, str(FOLDER / "init_dir" / name)
        seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(name, distributed_test.default_pg_timeout)
        dist.init_process_group(
            init_method=f"file://{case.file_name}",
            backend="gloo",
            world_size=COMM.size,
            rank=COMM.rank,
            timeout=timedelta(seconds=seconds),
        )
        case._barrier()
        set_rng_seed()
        getattr(case, name)()
        case._barrier()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        return ("skipped", CODES[end.code]) if end.code in CODES else ("failed", f"exit {end.code}")
    except BaseException:  # noqa: BLE001 - told
        return "failed", f"rank {COMM.rank}: {traceback.format_exc()}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed", ""


def main() -> None:
    """Run the tests from the given one on."""
    backend, part, first, results = sys.argv[1:]
    if backend != "gloo":
        distributed_c10d.ProcessGroupGloo = GlooStandIn
        # profilers see calls of the backends named here, and no other backend's
        distributed_test.PROFILING_SUPPORTED_BACKENDS.remove("gloo")
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.remove("gloo")
        if SOURCE:
            source_tree.stand_in()
    tests = source_tree.names(Path(SOURCE)) if SOURCE else unittest.TestLoader().getTestCaseNames(Suite)
    names = [name for name in tests if part in name]
    for number, name in enumerate(names):
        if number < int(first):
            continue
        prepare()
        if COMM.rank == 0:
            Path(f"{results}.started").write_text("\n".join(names[: number + 1]))
        verdicts = COMM.allgather(run(name))
        told = next((one for one in verdicts if one[0] == "failed"), None) or max(verdicts)
        if COMM.rank == 0:
            with Path(results).open("a") as file:
                file.write(json.dumps({"name": name, "verdict": told[0], "told": told[1]}) + "\n")
        if told[0] == "failed":
            COMM.Abort(1)


if __name__ == "__main__":
    main()
