"""Run the examples one after the other on two ranks, as ``make examples`` does, each also without compression.

``python -m examples.run_all --only ddp`` runs the examples whose names contain one of the words. The exit status is 1
if an example fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from images import DIGITS, find_images

from apps.launch import exit_on_signals, mpi_environment, python_command, run

FOLDER = Path(__file__).parent
EXAMPLES = ("plain_loop", "ddp", "fsdp2", "hsdp", "lightning_fit", "accelerate_loop", "trainer", "pretrained")
NEVER_COMPRESSED = ("fsdp2",)
LONGEST_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return the exit status."""
    parser = argparse.ArgumentParser(description="Run the examples.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="words of the names to run")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(argv)
    chosen = [name for name in EXAMPLES if any(word in name for word in options.only)]
    if not chosen:
        parser.error(f"no example is called so: there are {', '.join(EXAMPLES)}")
    exit_on_signals()
    images = find_images()
    print(f"images: {'digits of scikit-learn' if images == DIGITS else images}", flush=True)
    environment, failed = mpi_environment() | {"FASHION_MNIST": images}, []
    for name in chosen:
        print(f"--- mpirun -n {options.ranks} python examples/{name}.py", flush=True)
        for added in ([], *([["--dense"]] * (name not in NEVER_COMPRESSED))):
            command = python_command(options.ranks, [str(FOLDER / f"{name}.py"), *added])
            begun = time.monotonic()
            status, output = run(command, environment, timeout_s=LONGEST_S)
            ended = f"status {status}, " if status else ""
            heading = f"{'dense' if added else 'as it is':8} ({ended}{time.monotonic() - begun:.0f} s)"
            lines = output.strip().splitlines() if status else [_result(output)]
            print("\n".join(f"{heading}: {line}" for line in lines), flush=True)
            if status:
                failed.append(name)
                break
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _result(output: str) -> str:
    """Return the line with the accuracy: libraries print warnings besides it."""
    return next((line for line in output.splitlines() if line.startswith("accuracy")), output.strip())


if __name__ == "__main__":
    sys.exit(main())
