"""Command line: ``python -m apps.fuzz TARGET --runs N``."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import mpicomp.kernels
from apps.fuzz.campaign import Result, guided_campaign, is_guided, random_campaign
from apps.fuzz.target import Target

GROUPS = ("codecs", "messages", "files", "texts")
CORPUS = Path("runs/fuzz")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 if a target has a fault."""
    options = _parser().parse_args(argv)
    guided = is_guided() and not options.plain
    known = _instrumented_targets() if guided else targets()
    if options.list:
        print("\n".join(f"{name:<22}{one.reads}" for name, one in known.items()))
        return 0
    names = [*known] if options.all else options.target
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        print(f"error: there is no target {', '.join(unknown)}: name some of --list, or --all", file=sys.stderr)
        return 2
    results = []
    for name in names:
        if guided:
            amount = int(options.runs), options.seconds, options.seed
            results.append(guided_campaign(known[name], *amount, options.corpus))
        else:
            results.append(_random(known[name], options))
        _print(results[-1])
    print(f"{sum(one.runs for one in results)} inputs, {sum(bool(one.fault) for one in results)} faults")
    return int(any(one.fault for one in results))


def _instrumented_targets() -> dict[str, Target]:
    import atheris

    # Numba compiles the bytecode of kernels, which must stay as it is.
    kernels = [one.name for one in walk_packages(mpicomp.kernels.__path__, "mpicomp.kernels.")]
    with atheris.instrument_imports(include=["collectives", "mpicomp", "apps"], exclude=["mpicomp.kernels", *kernels]):
        return targets()


def targets() -> dict[str, Target]:
    """Return all targets by name."""
    found = [one for group in GROUPS for one in import_module(f"apps.fuzz.{group}").TARGETS]
    return {one.name: one for one in found}


def _random(target: Target, options: argparse.Namespace) -> Result:
    result = random_campaign(target, int(options.runs), options.seconds, options.seed)
    if result.fault:
        options.corpus.mkdir(parents=True, exist_ok=True)
        (options.corpus / f"fault-{target.name}").write_bytes(result.content)
    return result


def _print(result: Result) -> None:
    state = f"fault: {result.fault}" if result.fault else "no fault"
    print(f"{result.target:<22}{result.runs:>10} inputs  {result.seconds:6.1f} s  {state}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apps.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", help="names of targets")
    parser.add_argument("--all", action="store_true", help="all targets, one after the other")
    parser.add_argument("--list", action="store_true", help="print the targets")
    parser.add_argument("--runs", type=float, default=10_000, help="inputs for each target (default: 1e4)")
    parser.add_argument("--seconds", type=int, default=0, help="time limit of a target (default: 0, no limit)")
    parser.add_argument("--seed", type=int, default=1, help="of the inputs (default: 1)")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help=f"folder of inputs (default: {CORPUS})")
    parser.add_argument("--plain", action="store_true", help="mutate at random, also where atheris is installed")
    return parser


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
