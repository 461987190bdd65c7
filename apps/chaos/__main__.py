"""``python -m apps.chaos kills --kills 2000 --seed 1``: trainings whose ranks are killed at random.

A failure is printed with its seed; ``kills --seed SEED --jobs 1`` runs it again. See docs/faults.md.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from apps.chaos import churn, loops, soak
from apps.chaos.case import METHODS, Case, case_of_bursts, case_of_faults, case_of_kills
from apps.chaos.job import Launcher
from apps.chaos.judge import Verdict
from apps.chaos.kills import campaign, table
from apps.chaos.mismatches import Outcome
from apps.chaos.mismatches import campaign as play_all
from apps.chaos.punish import punish
from apps.emulator.network import ClusterError, Layout, Network
from apps.launch import JobFailed, exit_on_signals
from apps.records import Record, write_record
from collectives.cost.rate import Rate

KILLS = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 if a case failed."""
    options = _parser().parse_args(argv)
    exit_on_signals()
    return int(MODES[options.mode](options))


def _mismatches(options: argparse.Namespace) -> int:
    logging.disable(logging.WARNING)  # of ranks that wait for each other

    def report(found: Outcome) -> None:
        print(f"seed {found.seed}, {found.mutation}: {found.problem}", *found.errors, sep="\n  ", flush=True)

    counts = play_all(range(options.seed, options.seed + options.count), report)
    print(f"{options.count} sequences: " + ", ".join(f"{number} {name}" for name, number in counts.items()))
    return int(counts["faults"] > 0)


def _punish(options: argparse.Namespace) -> int:
    def report(rank: int, pid: int) -> None:
        print(f"{time.strftime('%H:%M:%S')} rank {rank}, process {pid}: killed", flush=True)

    job = options.job or os.environ.get("SLURM_JOB_ID")
    if job is None:
        print("error: --job is missing, and SLURM_JOB_ID is not set", file=sys.stderr)
        return 2
    kills = punish(job, options.mean_seconds, options.seed, options.kills, report, options.spare)
    print(f"{kills} ranks of job {job} killed")
    return 0


def _kills(options: argparse.Namespace, case_of: Callable[[int, int], Case] = case_of_kills) -> int:
    try:
        with ExitStack() as stack:
            network = None
            if options.hosts:
                layout = Layout((Rate.parse(options.rate),) * options.ranks)
                network = stack.enter_context(Network(layout))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpicomp-chaos-"))
            launcher = Launcher(network, Path(folder))
            stack.callback(launcher.close)

            def draw(seed: int) -> Case:
                return case_of(seed, options.ranks)

            def report(verdict: Verdict, record: Record) -> None:
                if verdict.problem:
                    print(f"{verdict.problem}: {verdict.case}\n{verdict.text}", file=sys.stderr, flush=True)
                if options.json is not None:
                    write_record(options.json, record)

            seeds = itertools.islice(itertools.count(options.seed), options.jobs)
            most = math.inf if options.jobs is not None else KILLS
            most = most if options.kills is None else options.kills
            record = campaign(draw, seeds, most, 60 * options.minutes, launcher, report)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(record), flush=True)
    print("faults: " + ", ".join(f"{number} {kind}" for kind, number in sorted(record["faults"].items())), flush=True)
    return int(bool(record["failures"]))


def _faults(options: argparse.Namespace) -> int:
    return _kills(options, case_of_faults)


def _bursts(options: argparse.Namespace) -> int:
    return _kills(options, case_of_bursts)


def _churn(options: argparse.Namespace) -> int:
    training = churn.Training(
        options.ranks, options.spares, options.batch, options.checkpoint_every, options.dataset, options.model,
        options.width, method=options.method, options=METHODS[options.method], seed=options.seed,
    )  # fmt: skip

    if len(options.minutes) not in (1, len(options.ways)):
        print(f"error: --minutes has one number, or one for each of {len(options.ways)} ways", file=sys.stderr)
        return 2
    seconds = {way: 60 * options.minutes[i % len(options.minutes)] for i, way in enumerate(options.ways)}

    def report(record: Record) -> None:
        minutes = ", ".join(f"{way['seconds'] / 60:.1f}" for way in record["ways"].values())
        print(f"{minutes} minutes\n{churn.table(record)}", flush=True)
        if options.json is not None:
            write_record(options.json, record)

    try:
        with tempfile.TemporaryDirectory(prefix="mpicomp-churn-") as folder:
            record = churn.campaign(
                training, seconds, options.turn, options.every, options.seed, Path(folder), report,
            )  # fmt: skip
    except (JobFailed, ValueError) as error:  # ValueError: the dataset is missing
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(record)
    failed = churn.failures(record)
    print(*failed, sep="\n", file=sys.stderr, flush=True)
    return int(bool(failed))


def _loops(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="mpicomp-chaos-") as folder, ExitStack() as stack:
        launcher = Launcher(folder=Path(folder), program="loop_rank")
        stack.callback(launcher.close)
        record = loops.campaign(
            itertools.count(options.seed), options.kills, 60 * options.minutes, launcher,
            lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
    if options.json is not None:
        write_record(options.json, record)
    print(f"{record['jobs']} jobs, kills by loop: {record['by_loop']}", flush=True)
    print(f"{record['wrong']} wrong, {record['hangs']} hangs, {record['errors']} errors", flush=True)
    return int(bool(record["failures"]))


def _soak(options: argparse.Namespace) -> int:
    records = [
        soak.run(soak.Soak(options.calls, options.ranks, deaths, options.seed))
        for deaths in dict.fromkeys((0, options.deaths))
    ]
    print(soak.table(records), flush=True)
    if options.json is not None:
        write_record(options.json, {"jobs": records})
    failed = [text for record in records for text in record["failures"]]
    print(*failed, sep="\n", file=sys.stderr, flush=True)
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apps.chaos", description="Run trainings whose ranks die.")
    modes = parser.add_subparsers(dest="mode", required=True)
    for name, text in (
        ("kills", "many short jobs, whose steps are compared with those of threads"),
        ("bursts", "the same with several kills within 60 ms"),
        ("faults", "the same with kills, stopped and slow ranks, full disks and damaged messages"),
    ):
        kills = modes.add_parser(name, help=text)
        kills.add_argument(
            "--kills", type=int, default=None, help=f"end after so many (default: {KILLS}; with --jobs no limit)"
        )
        kills.add_argument("--minutes", type=float, default=60.0, help="end after this time (default %(default)s)")
        kills.add_argument("--jobs", type=int, default=None, help="end after so many jobs (default: no limit)")
        kills.add_argument("--seed", type=int, default=1, help="of the first job; the next ones count up (%(default)s)")
        kills.add_argument("--ranks", type=int, default=8, help="most ranks of a job (default %(default)s)")
        kills.add_argument("--hosts", action="store_true", help="each rank on an emulated host of its own; needs root")
        kills.add_argument("--rate", default="1gbit", help="of each host's link (default %(default)s)")
        kills.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    looping = modes.add_parser("loops", help="users' training loops whose ranks are killed at random moments")
    looping.add_argument("--kills", type=int, default=300, help="end after so many (default %(default)s)")
    looping.add_argument("--minutes", type=float, default=60.0, help="end after this time (default %(default)s)")
    looping.add_argument("--seed", type=int, default=1, help="of the first job; the next ones count up (%(default)s)")
    looping.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    churning = modes.add_parser("churn", help="one long training whose ranks are killed and replaced, beside restarts")
    churning.add_argument(
        "--minutes", type=float, nargs="+", default=[10.0], help="of each way, or one number for all (default 10)"
    )
    churning.add_argument(
        "--every", type=float, default=60.0, help="mean seconds between two kills (default %(default)s)"
    )
    churning.add_argument("--turn", type=float, default=60.0, help="seconds of a way's turn (default %(default)s)")
    churning.add_argument("--ranks", type=int, default=2, help="ranks that train (default %(default)s)")
    churning.add_argument("--spares", type=int, default=4, help="ranks that wait (default %(default)s)")
    churning.add_argument(
        "--checkpoint-every", type=int, default=100, help="steps between two checkpoints (default %(default)s)"
    )
    churning.add_argument("--dataset", default="fashion-mnist", choices=("digits", "fashion-mnist"))
    churning.add_argument("--model", default="cnn", choices=("mlp", "cnn"))
    churning.add_argument("--width", type=int, default=None, help="channels of the first convolution of a cnn")
    churning.add_argument("--batch", type=int, default=64, help="samples of a rank and step (default %(default)s)")
    churning.add_argument("--method", "--algorithm", default="local-top-k", choices=sorted(METHODS))
    churning.add_argument("--seed", type=int, default=1, help="of model, data and kills (default %(default)s)")
    churning.add_argument("--ways", nargs="+", default=churn.WAYS, choices=churn.WAYS, help="default: all")
    churning.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    soaking = modes.add_parser("soak", help="very many calls of all methods, without deaths and with deaths")
    soaking.add_argument("--calls", type=int, default=1_000_000, help="of each of the two jobs (default %(default)s)")
    soaking.add_argument("--ranks", type=int, default=2, help="ranks that make the calls (default %(default)s)")
    soaking.add_argument(
        "--deaths", type=int, default=8, help="ranks that die in the second job, each of which another one replaces"
    )
    soaking.add_argument("--seed", type=int, default=1, help="of the calls and deaths (default %(default)s)")
    soaking.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    mismatches = modes.add_parser("mismatches", help="sequences of calls in which one rank makes another call")
    mismatches.add_argument("--count", type=int, default=500, help="number of sequences (default %(default)s)")
    mismatches.add_argument(
        "--seed", type=int, default=0, help="of the first one; the next ones count up (%(default)s)"
    )
    punishing = modes.add_parser("punish", help="kill ranks of a Slurm job on this node")
    punishing.add_argument("--job", help="its number (default: SLURM_JOB_ID)")
    punishing.add_argument("--mean-seconds", type=float, default=600.0, help="between two kills (default %(default)s)")
    punishing.add_argument("--seed", type=int, default=1, help="of the times and ranks (default %(default)s)")
    punishing.add_argument("--kills", type=int, default=1_000_000, help="end after so many (default: with the job)")
    punishing.add_argument("--spare", type=int, default=1, help="leave so many ranks of this node (%(default)s)")
    return parser


MODES: dict[str, Callable[[argparse.Namespace], int]] = {
    "kills": _kills,
    "bursts": _bursts,
    "faults": _faults,
    "loops": _loops,
    "churn": _churn,
    "soak": _soak,
    "mismatches": _mismatches,
    "punish": _punish,
}


if __name__ == "__main__":
    sys.exit(main())
