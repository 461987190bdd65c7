"""``mpicomp demo`` from its arguments to its last line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mpi4py import MPI

from collectives import Communicator
from collectives.cost.rate import EmulatedLink
from collectives.emulation.slow_comm import validate_link
from collectives.threads.run_local import run_local
from mpicomp.algorithms import Algorithm, Dense, Marsit
from mpicomp.cli.arguments import integer
from mpicomp.cli.command import conduct, require_none
from mpicomp.cli.demo import COMMAND, RANKS, picture, report
from mpicomp.cli.demo.display import Trainings
from mpicomp.cli.demo.model import N_PARAMETERS
from mpicomp.cli.demo.report import Comparison
from mpicomp.cli.demo.text import Text, read_text
from mpicomp.cli.demo.training import Point, compile_kernels, train

MOST_THREADS, MOST_STEPS, TESTS = 16, 100_000, 10
MOST_FACTOR = 2  # steps of Marsit for each step of dense
START_S = 60.0  # for the other ranks to have read their arguments
METHODS: dict[str, Algorithm] = {"dense": Dense(), "Marsit": Marsit(full_precision_every=None)}
BUSY = 0.5  # load of each core from which other programs lower the gain
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class DemoRequest:
    """Checked arguments. The ranks are as many `threads`, or those of MPI if it is 0."""

    threads: int
    link: EmulatedLink | None
    steps: int
    seed: int
    output: Path
    text: Text

    @classmethod
    def parse(cls, args: argparse.Namespace, processes: int) -> DemoRequest:
        """Check the arguments. ValueError gives the cause and the cure in a line."""
        if processes > 1 and args.ranks is not None:
            raise ValueError(f"--ranks {args.ranks}: mpirun has started {processes} ranks, which train: leave it out")
        threads = 0 if processes > 1 else integer("--ranks", args.ranks or str(RANKS), 2, MOST_THREADS)
        steps, seed = integer("--steps", args.steps, 1, MOST_STEPS), integer("--seed", args.seed, 0)
        return cls(threads, _link(args.link), steps, seed, Path(args.output), read_text())


def run(args: argparse.Namespace, missing: str = "") -> int:
    """Run the command and return its exit status; `missing` is why there is no MPI library, with the cure, or empty."""
    status = conduct(COMMAND, lambda: _start(args), _demonstrate)
    if missing and not status:
        print(f"The demo needs no MPI library, but jobs do: {missing}", flush=True)
    return status


def _link(text: str) -> EmulatedLink | None:
    if text.lower() == "none":
        return None
    try:
        link = EmulatedLink.parse(text)
    except ValueError as error:
        raise ValueError(f"--link {error}; or none") from None
    try:
        return validate_link(link)
    except ValueError as error:
        raise ValueError(f"--{error}") from None


def _start(args: argparse.Namespace) -> tuple[DemoRequest, Communicator]:
    request, problem = None, ""
    try:
        request = DemoRequest.parse(args, MPI.COMM_WORLD.size)
    except ValueError as error:
        problem = str(error)
    if request is not None and MPI.COMM_WORLD.rank == 0:
        problem = picture.output_problem(request.output)
    require_none(MPI.COMM_WORLD, problem, START_S)
    assert request is not None
    return request, Communicator(topology="ring", link=None if request.threads else request.link)


def _demonstrate(request: DemoRequest, world: Communicator) -> int:
    active, ranks = world.rank == 0, request.threads or world.size
    if active:
        print(_introduction(request, ranks), flush=True)
    _compile(request, world)
    with Trainings(active) as shown:
        dense = _train(request, world, shown, "dense", request.steps)
        marsit = _train(request, world, shown, "Marsit", MOST_FACTOR * request.steps, dense[-1].accuracy)
    if active:
        link = None if request.link is None else str(request.link)
        found = Comparison(dense, marsit, ranks, bool(request.threads), link)
        print("", report.text_table([report.HEADINGS, *found.rows()]), "", *found.conclusion(), sep="\n", flush=True)
        try:
            picture.draw(found, request.output)
            print(f"Picture: {request.output}")
        except ImportError:
            print("Picture: none, since Matplotlib is missing: pip install rich matplotlib")
        except OSError as error:
            print(
                f"Picture: none ({request.output}: {error.strerror}); make room there, or name another file (--output)"
            )
        print("", *report.next_steps(request.link), sep="\n", flush=True)
    return 0


def _introduction(request: DemoRequest, ranks: int) -> str:
    each = f"{ranks} {'threads' if request.threads else 'ranks of MPI'} train {N_PARAMETERS:,} parameters"
    dense = "first dense"
    if request.link is not None:
        seconds = request.steps * 8 * N_PARAMETERS * (ranks - 1) / ranks / request.link.bytes_per_s
        each += f" over links of {request.link}"
        dense += f", whose messages take {seconds:.0f} s"
    text = f"{each}:\n{dense}, then with Marsit until it has dense's accuracy"
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY * cores:
        # Dense mostly waits for its link. Marsit mostly computes, which takes longer on cores that are shared.
        text += f"\nOther programs use this machine (load {load:.1f} on {cores} cores), which makes the gain smaller"
    return text


def _compile(request: DemoRequest, world: Communicator) -> None:
    def note(text: str) -> None:
        if world.rank == 0:
            print(f"{COMMAND}: {text}", file=sys.stderr, flush=True)

    start = time.perf_counter()
    note("compiling kernels, once for this machine: up to half a minute")
    _on_ranks(request, world, lambda comm: compile_kernels(comm, tuple(METHODS.values())))
    note(f"kernels are ready after {time.perf_counter() - start:.0f} s")


def _train(
    request: DemoRequest, world: Communicator, shown: Trainings, name: str, steps: int, until: float = 2.0
) -> list[Point]:
    """Train and display one model."""
    shown.begin(name, steps)

    def on_rank(comm: Communicator) -> list[Point]:
        return train(
            comm,
            METHODS[name],
            request.text,
            steps=steps,
            test_every=max(1, request.steps // TESTS),
            seed=request.seed,
            until=until,
            report=shown.report if comm.rank == 0 else None,
        )

    points = _on_ranks(request, world, on_rank, request.link)
    shown.end(points[-1].step)
    return points


def _on_ranks(
    request: DemoRequest, world: Communicator, function: Callable[[Communicator], _Result],
    link: EmulatedLink | None = None,
) -> _Result:  # fmt: skip
    """Call a function on all ranks. The result is that of rank 0 of the threads, or of this rank of MPI."""
    return run_local(request.threads, function, "ring", link=link)[0] if request.threads else function(world)
