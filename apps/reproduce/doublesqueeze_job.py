"""What runs on the ranks: bytes, equality of the two forms, a step's computing, and the time of a synchronization."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F  # noqa: N812

import mpicomp
from apps.models import build
from apps.reproduce.book import Record
from apps.reproduce.doublesqueeze_methods import (
    DENSE,
    DS_1BIT,
    DS_TOPK,
    MEM_1BIT,
    MEM_TOPK,
    bytes_of_all,
    codecs,
    gathered,
    methods,
)
from collectives import Communicator
from collectives.execution.partition import pieces
from mpicomp.aggregator.base import Aggregator
from mpicomp.cli.bench.measure import gather, line_up
from mpicomp.reducers.coded import piece_elements
from mpicomp.reducers.two_pass import route

DETERMINISTIC = (DS_1BIT, MEM_1BIT, DS_TOPK, MEM_TOPK)
ENOUGH_S = 4.0  # of a method's calls after the first, whose memory and connections are new


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the request says; rank 0 writes what was found."""
    mpicomp.install_abort_hook()
    request = json.loads(Path((sys.argv[1:] if argv is None else argv)[0]).read_text())
    parts: dict[str, Callable[[Record], Record]] = {"forms": compare_forms, "step": time_step, "times": time_all}
    found = parts[request["part"]](request)
    if found["rank"] == 0:
        Path(request["path"]).write_text(json.dumps(found))
    return 0


def vector(n: int, rank: int, step: int) -> NDArray[np.float32]:
    """A rank's gradient: heavy-tailed, and a part of it the same on all ranks."""
    common = np.random.default_rng((0, step)).standard_t(3, n)
    return (common + np.random.default_rng((1, step, rank)).standard_normal(n)).astype(np.float32)


def lengths(name: str, form: str, comm: Communicator, n: int) -> list[int]:
    """Elements of each message of a vector."""
    if name == DENSE:
        return [n]
    codec, _ = codecs(name)
    longest = piece_elements(codec, n, comm.packed_piece_bytes())
    if gathered(name, form):
        return [len(cut) for cut in pieces(range(n), longest, codec.alignment)]
    return [len(cut) for cut in comm.program(route(comm), n, codec.alignment, longest).pieces]


def compare_forms(request: Record) -> Record:
    """Every form in turn."""
    found = {}
    for form in request["forms"]:
        with Communicator(topology=form, verify=False) as comm:  # so that only the methods themselves send bytes
            rank, found[form] = comm.rank, compare_form(comm, form, request["n"], request["steps"])
    return {"rank": rank, "forms": found}


def compare_form(comm: Communicator, form: str, n: int, steps: int) -> Record:
    """Some steps of every method: digests of results and errors, and bytes at a step beside the formula's."""
    rows = {}
    for name, method in methods().items():
        aggregator: Any = method.start(comm, n)
        digest = hashlib.sha256()
        for step in range(steps):
            digest.update(aggregator.aggregate(vector(n, comm.rank, step)).tobytes())
        sent = gather(comm, np.array([aggregator.traffic.total.bytes_sent / steps]))
        rows[name] = {
            "digest": digest.hexdigest(),
            "errors": _errors(comm, aggregator) if name in DETERMINISTIC else None,
            "bytes": float(sent.sum()),
            "busiest": float(sent.max()),
            "formula": bytes_of_all(name, form, lengths(name, form, comm, n), comm.size),
        }
    return rows


def _errors(comm: Communicator, aggregator: Aggregator) -> str:
    """Digest of all workers' errors and of the owners', put together."""
    state = aggregator.state_dict()
    workers = gather(comm, state["worker_error"].astype(np.float64))
    owners = gather(comm, state["owner_error"].astype(np.float64)).sum(axis=0)  # 0 where a rank owns nothing
    return hashlib.sha256(workers.tobytes() + owners.tobytes()).hexdigest()


def time_step(request: Record) -> Record:
    """Forward and backward pass on all ranks at the same time, as in training."""
    torch.set_num_threads(1)
    with Communicator() as comm:
        model = build("mlp", (1, 28, 28), 10, tuple(request["hidden"]), None)
        images, labels = torch.randn(request["batch"], 1, 28, 28), torch.arange(request["batch"]) % 10
        seconds = np.zeros(request["repeats"])
        for repeat in range(-5, request["repeats"]):
            line_up(comm)
            start = time.perf_counter()
            model.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            if repeat >= 0:
                seconds[repeat] = time.perf_counter() - start
        slowest = gather(comm, seconds).max(axis=0)
        return {"rank": comm.rank, "median_s": float(np.median(slowest))}


def time_all(request: Record) -> Record:
    """Every method's synchronization in every form and for every length, in turns."""
    found: Record = {}
    for n in request["lengths"]:
        of_length: Record = {}
        for form in request["forms"]:
            with Communicator(topology=form, timeout=300.0) as comm:
                rank = comm.rank
                started = {name: method.start(comm, n) for name, method in methods().items()}
                x, out = vector(min(n, 1_000_003), rank, 0), np.zeros(n, np.float32)
                of_length[form] = take_turns(comm, started, np.resize(x, n), out, request["repeats"])
        found[str(n)] = of_length
    return {"rank": rank, "times": found}


def take_turns(
    comm: Communicator, started: dict[str, Any], x: NDArray[np.float32], out: NDArray[np.float32], repeats: int
) -> Record:
    """Median seconds of a call on the slowest rank, and how many were timed; slow ones are called fewer times."""
    calls: dict[str, list[float]] = {name: [] for name in started}
    for _ in range(repeats + 1):
        for name, aggregator in started.items():
            if sum(calls[name][1:]) > ENOUGH_S:
                continue
            line_up(comm)
            start = time.perf_counter()
            aggregator.aggregate(x, out)
            own = time.perf_counter() - start
            calls[name].append(float(gather(comm, np.array([own])).max()))
    return {name: {"median_s": float(np.median(taken[1:])), "calls": len(taken) - 1} for name, taken in calls.items()}


if __name__ == "__main__":
    sys.exit(main())
