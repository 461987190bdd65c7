"""Split learning on all ranks of an MPI job: the server on rank 0, clients on the others.

``mpirun -n 3 python -m apps.pipeline.split --rounds 40 --json split.json --plot split.png``

The exit status is 0 if the runs ended, 1 after an error, 2 after a usage error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from apps.pipeline.program import run_program
from apps.pipeline.split.options import Options, parse
from apps.pipeline.split.plot import draw
from apps.pipeline.split.training import images_of, train
from apps.records import Record, write_record
from apps.train.agreement import JobError, naming_cure, raise_on_all_ranks
from collectives import Communicator

MB = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; collective over all ranks of the job. Returns the exit status."""
    return run_program(lambda: parse(argv), _run)


def _run(found: argparse.Namespace, comm: Communicator) -> None:
    runs = []
    with raise_on_all_ranks(comm):
        dataset = images_of(found.runs[0])
    for options in found.runs:
        try:
            runs.append(train(options, comm, dataset, partial(_report, comm, options)))
        except ValueError as error:  # all ranks have the same options and images, and so the same error
            raise JobError(str(error)) from error
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            _write(found, {"ranks": comm.size, "runs": runs})


def _report(comm: Communicator, options: Options, found: Record) -> None:
    if comm.rank == 0:
        print(
            f"{options.name}: round {found['round']:3d}/{options.rounds}  loss {found['loss']:.4f}  "
            f"test accuracy {found['test_accuracy']:.3f}  {found['bytes_up'] / MB:.3g} MB up, "
            f"{found['bytes_down'] / MB:.3g} MB down  {found['seconds']:.1f} s",
            flush=True,
        )


def _write(found: argparse.Namespace, record: Record) -> None:
    if found.json is not None:
        with naming_cure(found.json, "--json file"):
            write_record(found.json, record)
    if found.plot is not None:
        with naming_cure(found.plot, "--plot file"):
            draw(record["runs"], found.plot)


if __name__ == "__main__":
    sys.exit(main())
