"""Runs the tests under mpirun, and goes on after the failed one until each has had its turn."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.run_lanes import PROJECT, _end, environment
from tests.system.torch_suite.known import KNOWN_OF_SOURCES

SILENT_S = 150.0  # after which a job hangs
# Tests that fail as they must, and why. With Gloo those of the first kinds fail too.
KNOWN = {
    "needs GPUs, and does not look for them": (
        "test_all_to_all_cuda",
        "test_all_to_all_cuda_complex",
        "test_all_to_all_full_group_cuda",
        "test_all_to_all_group_cuda",
        "test_batch_isend_irecv_mixed_backend_err",
        "test_batch_isend_irecv_op_err",
    ),
    "needs torchvision": ("test_SyncBatchNorm_process_group",),
    "needs just 4 ranks": ("test_new_subgroups_with_group_param",),
    "awaits the words of Gloo's error": (
        "test_barrier_timeout_full_group",
        "test_barrier_timeout_global",
        "test_barrier_timeout_group",
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "awaits the name of Gloo": ("test_ddp_logging_data_cpu",),
}
REASONS = {name: reason for reason, names in (*KNOWN.items(), *KNOWN_OF_SOURCES.items()) for name in names}


def main() -> int:
    """Run the tests, print a line for each that does not pass, and count."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.torch_suite", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4 if os.environ.get("TORCH_SOURCE") else 3)
    parser.add_argument("--backend", choices=("mpicomp", "gloo"), default="mpicomp", help="gloo: to compare")
    parser.add_argument("--only", default="", help="tests whose name contains this")
    parser.add_argument("--output", type=Path, help="file for a line of JSON for each test")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        results = options.output or Path(folder) / "results"
        results.write_text("")
        for result in run(options, Path(folder), results):
            verdict, told = result["verdict"], result["told"]
            if verdict == "failed" and result["name"] in REASONS:
                verdict, told = "known", f"{REASONS[result['name']]}: {_last_error(told)}"
            counts[verdict] += 1
            if verdict != "passed":
                print(f"{verdict}: {result['name']}: {told}", flush=True)
    kinds = ("passed", "failed", "known", "skipped")
    print(", ".join(f"{counts[kind]} {kind}" for kind in kinds).replace("known", "failed as known"))
    return int(counts["failed"] > 0)


def run(options: argparse.Namespace, folder: Path, results: Path) -> Iterator[dict[str, Any]]:
    """Run all tests, in as many jobs as it takes, and yield the verdict on each."""
    done, waiting = 0, True
    while waiting:
        before = done
        env = environment() | {
            "BACKEND": "gloo",  # the tests know which of them Gloo passes; see `ranks`
            "WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "localhost",
            "TEMP_DIR": str(folder),
            "INIT_METHOD": f"file://{folder}/init_dir/shared_init_file",
        }
        command = ["mpirun", "-n", str(options.ranks), sys.executable, "-m", "tests.system.torch_suite.ranks"]
        command += [options.backend, options.only, str(done), str(results)]
        with (folder / "log").open("w") as log:
            job = subprocess.Popen(
                command, cwd=PROJECT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                told = time.monotonic()
                while job.poll() is None and time.monotonic() - told < SILENT_S:
                    time.sleep(0.2)
                    for result in _lines(results)[done:]:
                        done, told = done + 1, time.monotonic()
                        yield result
                waiting = job.poll() != 0
            finally:
                _end(job)
        for result in _lines(results)[done:]:
            done += 1
            yield result
        started = Path(f"{results}.started").read_text().split() if Path(f"{results}.started").exists() else []
        if waiting and len(started) <= done == before:  # before the first test
            raise RuntimeError((folder / "log").read_text()[-4000:])
        if waiting and len(started) > done:
            told_s = f"the job hung or crashed: {(folder / 'log').read_text()[-1500:]}"
            result = {"name": started[done], "verdict": "failed", "told": told_s}
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            done += 1
            yield result


def _last_error(told: str) -> str:
    return next((line for line in reversed(told.splitlines()) if "Error: " in line), "")


def _lines(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().split("\n") if line.endswith("}")]


if __name__ == "__main__":
    sys.exit(main())
