"""Measure on a machine with GPUs, in six minutes: tests, kernels, training steps, all-reduces and NCCL.

``python -m apps.performance.gpu_session`` prints tables in the order of `PARTS`, and writes them to ``report.md`` in
``--folder``, next to a record of each part. Every part has a limit of its own: one that fails or takes too long is
named at the end, and the others go on. ``--only kernels,training`` runs some.

``--dry-run`` runs everything on the CPU with short vectors, by `apps.performance.gpu_dry`, so that nothing is tried for
the first time where the GPU is. Tests are collected then, and kernels are interpreted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from apps.launch import PROJECT, mpi_environment, python_command, run
from apps.performance.part import choose_from

TESTS = ("tests/unit/kernels/gpu", "tests/unit/collectives/arrays")
LAST_LINES = 20


class SessionPart(NamedTuple):
    """A command that is given so many ranks and seconds; None: without mpirun."""

    name: str
    ranks: int | None
    limit_s: float
    module: str
    arguments: tuple[str, ...]
    dry: tuple[str, ...]

    def command(self, folder: Path, dry_run: bool) -> list[str]:
        """Return the command line."""
        if self.module == "pytest":
            return python_command(self.ranks, ["-m", "pytest", *(self.dry if dry_run else self.arguments)])
        record = ["--json", str(folder / f"{self.name}.json")]
        through = ["apps.performance.gpu_dry", self.module] if dry_run else [f"apps.performance.{self.module}"]
        return python_command(self.ranks, ["-m", *through, *(self.dry if dry_run else self.arguments), *record])


SMALL = ("--quick", "--layers", "1", "--width", "8", "--context", "4", "--repeats", "2")
PARTS = (
    SessionPart("tests", None, 100, "pytest", ("-q", "-x", "--no-header", *TESTS), ("-q", "--collect-only", *TESTS)),
    SessionPart("kernels", None, 50, "gpu_kernels", (), ("--quick", "--count", "3000")),
    SessionPart("kernels-of-a-share", None, 25, "gpu_kernels", ("--count", "458752"), ("--quick", "--count", "1000")),
    SessionPart("training", 1, 60, "gpu_training", ("--repeats", "20"), SMALL),
    SessionPart("training-2-ranks", 2, 75, "gpu_training", ("--repeats", "10"), SMALL),
    SessionPart("allreduce", 2, 50, "gpu_allreduce", ("--mb", "400"), ("--quick", "--mb", "0.02")),
)
NAMES = tuple(part.name for part in PARTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit status: 1 where one has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.performance.gpu_session", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU, for no figures")
    parser.add_argument("--only", type=choose_from(NAMES), default=NAMES, metavar="PART,PART", help=", ".join(NAMES))
    parser.add_argument("--folder", type=Path, default=PROJECT / "runs" / "gpu-session", help="of the records")
    options = parser.parse_args(argv)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environment = mpi_environment() | ({"TRITON_INTERPRET": "1"} if options.dry_run else {})
    failed, report = [], ""
    for part in (one for one in PARTS if one.name in options.only):
        begun = time.monotonic()
        command = part.command(folder, options.dry_run)
        # interpreted kernels are slow, and nobody waits for a machine meanwhile
        limit_s = None if options.dry_run else part.limit_s
        status, output = run(command, environment, cwd=PROJECT, timeout_s=limit_s)
        text = output if status == 0 and part.module != "pytest" else "\n".join(output.splitlines()[-LAST_LINES:])
        body = f"## {part.name} ({time.monotonic() - begun:.0f} s, status {status})\n\n{text.strip()}\n\n"
        print(body, flush=True)
        report += body
        (folder / "report.md").write_text(report)  # a session that ends early has it as well
        if status:
            failed.append(part.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
