"""Command line: ``python -m apps.fuzz TARGET --runs N``."""

from __future__ import annotations

import argparse
import faulthandler
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from apps.fuzz.campaign import Result, guided_campaign, is_guided, random_campaign
from apps.fuzz.target import Target

GROUPS = ("codecs", "messages", "files", "texts")
CORPUS = Path("runs/fuzz")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 if a target has a fault."""
    options = _parser().parse_args(argv)
    faulthandler.enable()
    guided = is_guided() and not options.plain
    if guided and options.target is not None:
        import atheris

        # Numba compiles the bytecode of kernels, which must stay as it is.
        with atheris.instrument_imports(include=["collectives", "mpicomp", "apps"], exclude=["mpicomp.kernels"]):
            found = targets()
        guided_campaign(found[options.target], int(options.runs), options.seed, options.corpus)
        return 0
    if options.list:
        print("\n".join(f"{name:<22}{one.reads}" for name, one in targets().items()))
        return 0
    if not options.all and options.target not in targets():
        print(f"error: there is no target {options.target}: name one of --list, or --all", file=sys.stderr)
        return 2
    names = [*targets()] if options.all else [options.target]
    results = []
    for name in names:
        results.append(_in_a_process(name, options) if guided else _here(name, options))
        _print(results[-1])
    print(f"{sum(one.runs for one in results)} inputs, {sum(bool(one.fault) for one in results)} faults")
    return int(any(one.fault for one in results))


def targets() -> dict[str, Target]:
    """Return all targets by name."""
    found = [one for group in GROUPS for one in import_module(f"apps.fuzz.{group}").TARGETS]
    return {one.name: one for one in found}


def _here(name: str, options: argparse.Namespace) -> Result:
    result = random_campaign(targets()[name], int(options.runs), options.seed)
    if result.fault:
        options.corpus.mkdir(parents=True, exist_ok=True)
        (options.corpus / f"fault-{name}").write_bytes(result.content)
    return result


def _in_a_process(name: str, options: argparse.Namespace) -> Result:
    """Run a guided campaign, which ends its process."""
    command = [sys.executable, "-m", "apps.fuzz", name, f"--runs={options.runs}", f"--seed={options.seed}"]
    done = subprocess.run([*command, f"--corpus={options.corpus}"], capture_output=True, text=True, errors="replace")
    text = done.stdout + done.stderr
    runs = re.search(r"number_of_executed_units:\s+(\d+)", text)
    fault = "" if done.returncode == 0 else "\n".join(text.splitlines()[-30:])
    return Result(name, int(runs[1]) if runs else 0, fault, b"", 0.0)


def _print(result: Result) -> None:
    state = f"fault: {result.fault}" if result.fault else "no fault"
    print(f"{result.target:<22}{result.runs:>10} inputs  {result.seconds:6.1f} s  {state}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apps.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", help="name of a target")
    parser.add_argument("--all", action="store_true", help="all targets, one after the other")
    parser.add_argument("--list", action="store_true", help="print the targets")
    parser.add_argument("--runs", type=float, default=10_000, help="inputs for each target (default: 1e4)")
    parser.add_argument("--seed", type=int, default=1, help="of the inputs (default: 1)")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help=f"folder of inputs (default: {CORPUS})")
    parser.add_argument("--plain", action="store_true", help="mutate at random, also where atheris is installed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
