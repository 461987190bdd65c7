"""Compare the speed of two checkouts call by call: jobs of both stand ready, and each waits while the other is timed.

``python -m apps.performance.turn_by_turn --old PATH --ranks 2`` prints a row for every call. `compare_checkouts` runs
whole measurements in turn. Minutes lie between those of both checkouts, in which a machine's speed may vary by more
than the checkouts do. Here it is milliseconds. A waiting rank sleeps in a read, and takes no processor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from select import select
from statistics import median, quantiles
from typing import IO, Any

PROJECT = Path(__file__).resolve().parents[2]
SHORT, LONG = 256, 2_000_000
CALLS = {SHORT: 2000, LONG: 5}
"""Calls of a turn, by their elements; steps are single."""
METHODS = (
    "dense", "marsit", *(f"relay:levels={levels}" for levels in (2, 3, 4, 8, 16, 256)), "majority-vote", "ef-signsgd",
    "ssdm", "qsgd", "ecq-sgd", "terngrad", "one-bit-sgd", "double-squeeze", "mem-sgd", "scalecom", "random-k",
    "local-top-k", "top-k-sgd", "power-sgd",
)  # fmt: skip
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "Marsit": ("marsit", {}),
    "Marsit, overlap": ("marsit", {"overlap": True}),
    "DoubleSqueeze": ("double-squeeze", {}),
    "ScaleCom": ("scalecom", {}),
    "PowerSGD": ("power-sgd", {}),
}
HOOKS = {"Gloo": None, "Gloo, hook of Marsit": "marsit", "Gloo, hook of PowerSGD": "power-sgd"}
KERNELS = "NUMBA_CACHE_DIR"
WHICH = ("old", "new")
LEAST_RATIO = 0.97
LOOK_S = 0.5
"""Seconds without an answer after which the status of a job is checked."""


# A rank of a job, whose checkout may be an old one: it imports names that both have -----------------------------------


def serve(folder: Path, which: str, steps: bool) -> None:
    """Read the names and counts of calls from the parent, and time these calls, until it closes its end."""
    import mpicomp

    with mpicomp.Communicator() as comm, ExitStack() as left:
        calls = dict(_short_calls(comm)) | (dict(_long_calls(comm)) | dict(_steps(comm, left)) if steps else {})
        go_path, done_path = _pipes(folder, which, comm.rank)
        with done_path.open("w") as done, go_path.open() as go:
            print("|".join(calls), file=done, flush=True)
            for line in go:
                name, _, count = line.rstrip("\n").rpartition(" ")
                call, start = calls[name], time.perf_counter()
                for _ in range(int(count)):
                    call()
                print(time.perf_counter() - start, file=done, flush=True)


def _short_calls(comm: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    import numpy as np

    import mpicomp

    x = np.random.default_rng(comm.rank).standard_normal(SHORT, np.float32)
    for name in ("dense", "marsit", "qsgd", "scalecom"):
        aggregator = mpicomp.algorithm(name).start(comm, SHORT)
        yield f"{SHORT} elements, {name}", partial(aggregator.aggregate, x, np.empty_like(x))


def _long_calls(comm: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    import numpy as np

    import mpicomp

    x = np.random.default_rng(comm.rank).standard_normal(LONG, np.float32)
    out, total = np.empty_like(x), np.empty_like(x)
    yield f"{LONG} elements, MPI", partial(comm.mpi_comm.Allreduce, x, total)
    for name in METHODS:
        method, _, levels = name.partition(":levels=")
        options = {"levels": int(levels)} if levels else {}
        try:
            aggregator = mpicomp.algorithm(method, **options).start(comm, LONG)
        except ValueError:  # an old checkout does not know it
            continue
        yield f"{LONG} elements, {name}", partial(aggregator.aggregate, x, out)


def _steps(comm: Any, left: ExitStack) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    import mpicomp
    from apps.performance.cluster.steps import build
    from mpicomp.torch import DistributedOptimizer, ddp_hook

    def step(model: Any, loss: Any, optimizer: Any) -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.set_num_threads(1)
    for name, (method, options) in OPTIMIZERS.items():
        model, loss = build("transformer")
        inner, own = torch.optim.SGD(model.parameters(), lr=1e-6), left.enter_context(mpicomp.Communicator())
        optimizer = DistributedOptimizer(inner, mpicomp.algorithm(method), own, model.named_parameters(), **options)
        yield f"step, {name}", partial(step, model, loss, optimizer)
    store = f"file://{os.environ['TURN_STORE']}"
    distributed.init_process_group("gloo", init_method=store, rank=comm.rank, world_size=comm.size)
    left.callback(distributed.destroy_process_group)
    for name, hooked in HOOKS.items():
        model, loss = build("transformer")
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1 << 12)
        if hooked is not None:
            wrapped.register_comm_hook(*ddp_hook(mpicomp.algorithm(hooked), comm, wrapped))
        yield f"step, DDP over {name}", partial(step, wrapped, loss, torch.optim.SGD(model.parameters(), lr=1e-6))


def _pipes(folder: Path, which: str, rank: int) -> tuple[Path, Path]:
    return folder / f"{which}-{rank}-go", folder / f"{which}-{rank}-done"


# The parent, which holds both jobs ------------------------------------------------------------------------------------


class Job:
    """A checkout's job, all ranks of which wait for names of calls.

    Attributes
    ----------
    names : list of str
        Names of the calls.
    """

    def __init__(self, which: str, checkout: Path, folder: Path, n_ranks: int, steps: bool, left: ExitStack) -> None:
        from apps.launch import mpi_environment, python_command

        pipes = [_pipes(folder, which, rank) for rank in range(n_ranks)]
        for path in chain(*pipes):
            os.mkfifo(path)
        environment = mpi_environment(checkout) | {
            "PYTHONPATH": str(checkout),
            "TURN_STORE": str(folder / f"{which}-store"),
            **({KERNELS: f"{os.environ[KERNELS]}-{which}"} if KERNELS in os.environ else {}),
        }
        arguments = ["-P", __file__, "--serve", str(folder), "--which", which, *["--steps"] * steps]
        command = python_command(n_ranks, arguments)
        self._process = subprocess.Popen(command, cwd=checkout, env=environment, stdin=subprocess.DEVNULL)
        left.callback(self._end)
        # both ways, as opening one end of a pipe waits for the other, which a job that cannot begin never opens
        self._go = [left.enter_context(_open(go, "w")) for go, _ in pipes]
        self._done = [left.enter_context(_open(done, "r")) for _, done in pipes]
        self.names = min(self._read(one) for one in self._done).split("|")

    def time(self, name: str, count: int) -> float:
        """Return the seconds that a call took on the slowest rank."""
        for one in self._go:
            print(name, count, file=one, flush=True)
        return max(float(self._read(one)) for one in self._done) / count

    def _read(self, done: IO[str]) -> str:
        while not select([done], [], [], LOOK_S)[0]:
            if self._process.poll() is not None:
                raise SystemExit(f"a job has ended with status {self._process.returncode}: its output is above")
        return done.readline().rstrip("\n")

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait()


def _open(path: Path, mode: str) -> IO[str]:
    return os.fdopen(os.open(path, os.O_RDWR), mode)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 where a ratio is too low."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(options.serve, options.which, options.steps)
        return 0
    if options.old is None or options.rounds < 2:
        parser.error("--old PATH is needed, and 2 --rounds or more")
    from apps.performance.compare_checkouts import COLUMNS
    from apps.performance.part import make_record, table
    from apps.records import write_record

    with ExitStack() as left:
        folder = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="mpicomp-turns-")))
        jobs = {
            which: Job(which, getattr(options, which).resolve(), folder, options.ranks, options.steps, left)
            for which in WHICH
        }
        names = [name for name in jobs["new"].names if name in jobs["old"].names and options.only in name]
        rows = [measure(jobs, name, options) for name in names]
    columns = [("quartiles of rounds" if name == "of single turns" else name, cell) for name, cell in COLUMNS]
    print(table(columns, rows))
    if options.json is not None:
        write_record(options.json, make_record(rows, ranks=options.ranks, rounds=options.rounds))
    return int(any(row["ratio"] < LEAST_RATIO for row in rows))


def measure(jobs: dict[str, Job], name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time a call of both jobs in turn: medians, the median of the rounds' ratios, and the quartiles of those."""
    count = next((count for elements, count in CALLS.items() if name.startswith(f"{elements} ")), 1)
    seconds: dict[str, list[float]] = {which: [] for which in WHICH}
    for turn in range(options.warm_ups + options.rounds):
        for which in WHICH if turn % 2 == 0 else WHICH[::-1]:
            seconds[which].append(jobs[which].time(name, count))
    old, new = (seconds[which][options.warm_ups :] for which in WHICH)
    ratios = [before / after for before, after in zip(old, new, strict=True)]
    lower, ratio, upper = quantiles(ratios, n=4)
    print(f"{name}: {ratio:.3f} ({lower:.3f} to {upper:.3f})", file=sys.stderr, flush=True)
    key = ("turn by turn", f"{options.ranks} rank{'s' * (options.ranks > 1)}", name)
    row = {"key": key, "old": median(old), "new": median(new), "ratio": ratio, "each": [lower, upper]}
    return row | {f"{which}_us": [round(1e6 * one, 2) for one in seconds[which][options.warm_ups :]] for which in WHICH}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.performance.turn_by_turn", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--old", type=Path, metavar="PATH", help="a checkout of an earlier commit")
    parser.add_argument("--new", type=Path, default=PROJECT, metavar="PATH", help="the other checkout (this one)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of each job (%(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="timed turns of each call (%(default)s)")
    parser.add_argument("--warm-ups", type=int, default=4, help="turns before them (%(default)s)")
    parser.add_argument(
        "--steps", action="store_true", help="long calls and steps of PyTorch as well, on 2 ranks or more"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose name has this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a record as well")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--which", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
