"""Many inputs for one target: guided by coverage with atheris, else mutated at random."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from apps.fuzz import mutation
from apps.fuzz.target import HUNG_S, LONGEST_S, Hang, Target, limit_time, raise_hang

MOST_MIB = 4096  # of the process


class Result(NamedTuple):
    """Inputs that a target has read, and the fault that ended it, or an empty text."""

    target: str
    runs: int
    fault: str
    content: bytes
    seconds: float


def is_guided() -> bool:
    """Return whether atheris can be imported."""
    return find_spec("atheris") is not None


def prepare_seeds(target: Target) -> list[bytes]:
    """Return the seeds after each has been read once; AssertionError if one is a fault."""
    seeds = [*target.seeds()]
    for content in seeds:
        # compiles kernels and imports modules without a time limit
        target.fault(content)
    for content in seeds:
        fault = target.fault(content)
        assert not fault, f"{target.name}, a seed: {fault}"
    return seeds


def _timed(target: Target, content: bytes) -> str:
    """Read an input, and once more if that takes long: the first time may have compiled a kernel."""
    for _ in range(2):
        began = time.process_time()
        fault = target.fault(content)
        if fault or time.process_time() - began <= LONGEST_S:
            return fault
    return f"an input took longer than {LONGEST_S:g} s"


def random_campaign(target: Target, runs: int, seconds: int, seed: int) -> Result:
    """Read random mutations of the seeds, up to the first fault."""
    seeds = prepare_seeds(target)
    start, done, content = time.perf_counter(), 0, b""
    before = signal.signal(signal.SIGALRM, raise_hang)
    try:
        for content in mutation.inputs(seeds, runs, seed):
            limit_time(HUNG_S)
            fault = _timed(target, content)
            done += 1
            if not fault and seconds and time.perf_counter() - start > seconds:
                break
            if fault:
                return Result(target.name, done, fault, content, time.perf_counter() - start)
    except Hang as error:
        return Result(target.name, done, str(error), content, time.perf_counter() - start)
    finally:
        limit_time(0)
        signal.signal(signal.SIGALRM, before)
    return Result(target.name, done, "", b"", time.perf_counter() - start)


def guided_campaign(target: Target, runs: int, seconds: int, seed: int, corpus: Path) -> Result:
    """Read inputs that coverage guides, in a process of their own; a fault's input is left next to the corpus."""
    corpus.mkdir(parents=True, exist_ok=True)
    log, start = corpus / f"{target.name}.txt", time.perf_counter()
    sys.stdout.flush()
    # forked, since imports take longer than many campaigns; the reader's modules must have been imported under
    # ``atheris.instrument_imports``
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            _fuzz(target, runs, seconds, seed, corpus)
        except BaseException:  # noqa: BLE001 - the copy of the parent must not go on
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)  # not reached after a campaign, which ends the process
    _, status = os.waitpid(child, 0)
    text = log.read_text(errors="replace")
    counted = re.search(r"number_of_executed_units:\s+(\d+)", text)
    fault = "" if status == 0 else f"see {log}"
    return Result(target.name, int(counted[1]) if counted else 0, fault, b"", time.perf_counter() - start)


def _fuzz(target: Target, runs: int, seconds: int, seed: int, corpus: Path) -> None:
    import atheris

    folder = corpus / target.name
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(prepare_seeds(target)):
        (folder / f"seed-{number:04d}").write_bytes(content)

    def read(content: bytes) -> None:
        fault = target.fault(content)
        if fault:
            raise AssertionError(f"{target.name}: {fault}")

    limits = [f"-timeout={HUNG_S:g}", f"-rss_limit_mb={MOST_MIB}", f"-max_len={mutation.MOST_BYTES}"]
    amount = [f"-runs={runs}", f"-max_total_time={seconds}", f"-seed={seed}", "-print_final_stats=1"]
    places = [f"-artifact_prefix={corpus}/fault-{target.name}-", str(folder)]
    atheris.Setup([sys.argv[0], *amount, *limits, *places], read)
    atheris.Fuzz()
