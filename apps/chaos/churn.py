"""The same training three ways, in turns: undisturbed, with ranks that are replaced, and with restarts after deaths.

Each way has jobs of its own, which are paused while another way has its turn, so that all ways meet the same noise of
the machine. Time counts in a way's own turns alone.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from apps.chaos.churn_checkpoint import MANIFEST, checkpoints
from apps.chaos.job import FAULT_TOLERANT, STACKS_S
from apps.chaos.judge import BALANCED
from apps.chaos.pace import Commits, Times, part_kept, seconds_lost
from apps.chaos.running_job import RunningJob, make_folder
from apps.chaos.timeline import Kill, Timeline
from apps.environment import environment
from apps.launch import JobFailed, find_mpirun, mpi_environment
from apps.records import Record, read_record, write_record

POLL_S = 0.02
WATCHDOG_S = 300.0
LOSS_BAND = 0.05
WARM_STEPS = 20  # before the clock of a way starts
# Kills fall into the last two fifths of their interval. So three windows of a fifth fit between two kills: one behind
# the recovery, a second one, and one before the next kill.
JITTER, WINDOW = 0.4, 0.2  # of the seconds between two kills
LAST_ERRORS, LAST_CHARACTERS = 10, 4000
MOST_FAILED_STARTS = 3  # jobs in a row that make no step
N_SAMPLES = 20_000


@dataclass(frozen=True)
class Training:
    """Training that all ways make."""

    ranks: int = 2
    spares: int = 4  # ranks that wait with `on_failure="regroup"`
    batch: int = 64  # samples of a rank and step
    checkpoint_every: int = 100  # steps
    dataset: str = "fashion-mnist"  # this and the following options are those of `apps.train`
    model: str = "cnn"
    width: int | None = 16
    learning_rate: float = 0.02
    method: str = "local-top-k"
    options: dict[str, object] = field(default_factory=lambda: {"rate": 10})
    seed: int = 1

    def request(self, way: str, data: Path, saved: Path, checkpoint: Path | None) -> Record:
        """Return the request of a job for `apps.chaos.churn_rank`."""
        regroups = way == "regroup"
        return asdict(self) | {
            "on_failure": "regroup" if regroups else "raise",
            "spares": self.spares if regroups else 0,
            "checkpoint_every": 0 if way == "undisturbed" else self.checkpoint_every,
            "data": str(data),
            "checkpoints": str(saved),
            "checkpoint": None if checkpoint is None else str(checkpoint),
        }


WAYS = ("undisturbed", "regroup", "raise")


class Clock:
    """Time of a way's own turns, of a clock that all processes share."""

    def __init__(self) -> None:
        self._edges: list[float] = []  # starts and ends of turns, in order
        self._seconds: list[float] = []  # of turns up to each of them

    def start(self) -> None:
        """Begin a turn."""
        self._edges.append(time.monotonic())
        self._seconds.append(self._seconds[-1] if self._seconds else 0.0)

    def stop(self) -> None:
        """End a turn."""
        now = time.monotonic()
        self._seconds.append(self._seconds[-1] + now - self._edges[-1])
        self._edges.append(now)

    def at_each(self, times: Times) -> Times:
        """Return the seconds of turns up to each time, of which none is in the future."""
        edges, seconds = self._edges, self._seconds
        if not edges:
            return np.zeros_like(times)
        if len(edges) % 2:  # a turn goes on
            now = time.monotonic()
            edges, seconds = [*edges, now], [*seconds, seconds[-1] + now - edges[-1]]
        return np.interp(times, edges, seconds)

    def at(self, when: float) -> float:
        """Return the seconds of turns up to a time."""
        return float(self.at_each(np.array(when)))

    @property
    def now(self) -> float:
        """Seconds of turns up to now."""
        return self.at(time.monotonic())


class Way:
    """One way of making a training, with its jobs, kills and figures."""

    def __init__(
        self, name: str, training: Training, folder: Path, data: Path, env: Mapping[str, str], every_s: float, seed: int
    ) -> None:
        # of `WAYS`; the folder has its jobs and checkpoints, and the data are the samples
        self.name, self._training, self._folder, self._data = name, training, folder, data
        self._saved = folder / "checkpoints"
        self._saved.mkdir(parents=True)
        # the mean seconds between two kills, which the seed draws
        self._draw, self._every_s = random.Random(seed), every_s
        self.clock, self.setup = Clock(), Clock()
        self.timeline = Timeline(training.batch, training.method in BALANCED)
        self.rates: list[float] = []
        self.hangs, self.planned, self.restarts = 0, 0, 0
        self.errors: list[str] = []
        self._n_errors = self._failed_starts = 0
        self._n_kills = 0
        self._next_kill = self._draw_time() if name != "undisturbed" else float("inf")
        self._progress = 0.0  # time of the clock at the last committed step, or at the watchdog's last alarm
        self._job: RunningJob | None = None
        self._ready: set[int] = set()
        self._ended: float | None = None  # when the last job ended
        self.restart_seconds: list[float] = []
        self.start_samples = 0
        self._env = dict(env) | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    # Jobs ------------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Start the first job, and pause it after a few steps; its clock has not started then."""
        self.setup.start()
        self._launch()
        regroups = self.name == "regroup"
        ranks = self._training.ranks + (self._training.spares if regroups else 0)
        while len(self._ready) < ranks or self.timeline.newest < WARM_STEPS:
            self._advance(self.setup)
            time.sleep(POLL_S)
        self._pause()
        self.setup.stop()
        self._ended = None
        self.start_samples, self._progress = self.timeline.samples, 0.0

    def take_turn(self, seconds: float) -> None:
        """Let the training go on for so many seconds, with kills in their time."""
        assert self._job is not None
        before = self.timeline.samples
        self.clock.start()
        self._job.resume()
        start, end = self.clock.now, self.clock.now + seconds
        self._progress = max(self._progress, start)
        while (now := self.clock.now) < end:
            self._advance(self.clock)
            if now >= self._next_kill and self._is_settled(now):
                self._kill()
            time.sleep(POLL_S)
        self._pause()
        self.clock.stop()
        self.rates.append((self.timeline.samples - before) / seconds)

    def finish(self) -> None:
        """Wait until the last kill has been survived, and end the job."""
        if self._job is not None and self.timeline.pending is not None:
            self.clock.start()
            self._job.resume()
            self._progress = max(self._progress, self.clock.now)
            hangs = self.hangs
            while self.timeline.pending is not None and self.hangs == hangs:
                self._advance(self.clock)
                time.sleep(POLL_S)
            self.clock.stop()
        self.close()

    def close(self) -> None:
        """End the job."""
        if self._job is not None:
            self._read()
            self._job.end()
            self.timeline.end_job()
            self._job = None

    def _pause(self) -> None:
        assert self._job is not None
        self._job.pause()
        self._read()
        self.timeline.settle()

    def _launch(self) -> None:
        found = checkpoints(self._saved)
        checkpoint = found[-1] if found else None
        saved: Record = {"step": 0, "members": []}
        if checkpoint is not None:
            saved = read_record(checkpoint / MANIFEST, step=int, members=list)
        self.timeline.begin_job(saved["step"], saved["members"])
        self._ready = set()
        folder = make_folder(self._folder)
        write_record(
            folder / "request.json", self._training.request(self.name, self._data, self._saved, checkpoint)
        )  # fmt: skip
        regroups = self.name == "regroup"
        ranks = self._training.ranks + (self._training.spares if regroups else 0)
        command = [
            find_mpirun(), *(FAULT_TOLERANT if regroups else ()), "-n", str(ranks), "--oversubscribe", "--bind-to",
            "none", sys.executable, "-m", "apps.chaos.churn_rank", str(folder / "request.json"),
        ]  # fmt: skip
        self._job = RunningJob(command, self._env, folder)

    def _read(self) -> None:
        assert self._job is not None
        last = self.timeline.last_time
        for rank, row in self._job.read():
            if row["kind"] == "ready":
                self._ready.add(rank)
            self.timeline.add(rank, row)
        if self.timeline.last_time > last and self._ended is not None:
            self.restart_seconds.append(self.clock.at(self.timeline.last_time) - self._ended)
            self._ended = None

    def _advance(self, clock: Clock) -> None:
        """Read lines, start a job in the place of one that has ended, and end one that hangs."""
        assert self._job is not None
        status = self._job.status()
        before = self.timeline.last_time
        self._read()
        if self.timeline.last_time > before:
            self._progress, self._failed_starts = clock.now, 0
        if status is not None:
            self._start_again(status, clock)
        elif clock.now - self._progress > WATCHDOG_S:
            self.hangs += 1
            self._job.request_stacks()
            time.sleep(STACKS_S)
            self._add_error("no step was committed", self._job.end())
            self._relaunch(clock)

    def _start_again(self, status: int, clock: Clock) -> None:
        assert self._job is not None
        output = self._job.end()
        is_planned = self.timeline.is_short and status == 0
        is_expected = self.name == "raise" and self.timeline.pending is not None
        self.planned += is_planned
        if not is_planned and not is_expected:
            self._add_error(f"a job ended with status {status}", output)
        self._relaunch(clock)

    def _relaunch(self, clock: Clock) -> None:
        self._job = None
        self.timeline.end_job()
        self.restarts += 1
        self._ended = clock.now
        self._progress = clock.now
        self._failed_starts += 1
        if self._failed_starts > MOST_FAILED_STARTS:
            raise JobFailed(
                f"{self.name}: {MOST_FAILED_STARTS} jobs in a row made no step\n{''.join(self.errors[-1:])}"
            )
        self._launch()

    def _add_error(self, text: str, output: str) -> None:
        self._n_errors += 1
        self.errors = [
            *self.errors[-LAST_ERRORS + 1 :],
            f"job {self.timeline.job}: {text}\n{output[-LAST_CHARACTERS:]}",
        ]

    def _kill(self) -> None:
        assert self._job is not None
        members = self.timeline.members
        if len(members) < min(2, self._training.ranks):
            return  # the next job is still starting, or no other rank would be left
        victim = self._draw.choice(sorted(members))
        pid = self._job.reader.processes[victim]
        self.timeline.add_kill(victim, time.monotonic())
        with suppress(ProcessLookupError):  # its job has just ended for another reason
            os.kill(pid, signal.SIGKILL)
        self._next_kill = max(self._draw_time(), self.clock.now)

    def _is_settled(self, now: float) -> bool:
        """Return whether two windows have passed since the last kill and any restart behind it."""
        if not (kills := self.timeline.kills):
            return True
        settled = kills[-1].settled
        return settled is not None and now >= self.clock.at(settled) + 2 * WINDOW * self._every_s

    def _draw_time(self) -> float:
        """Return the time of the next kill: not of a fixed phase, which could be that of the turns."""
        self._n_kills += 1
        return self._every_s * (self._n_kills - JITTER * self._draw.random())

    # Figures ---------------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Samples that were committed in this way's turns."""
        return self.timeline.samples - self.start_samples

    def record(self) -> Record:
        """Return the figures of this way's turns so far, and of the recovery from the last kill behind them."""
        seconds = self.clock.now
        line, kills = self.timeline, self.timeline.kills
        times = [self._seconds_of(kill) for kill in kills if kill.recovered is not None]
        found, lost_s = np.array(times), self._seconds_lost()
        # a checkpoint has the residuals of all ranks
        lost = [kill.lost for kill in kills if kill.lost and self.name == "regroup"]
        return {
            "seconds": seconds,
            "steps": len(line.steps),
            "samples": self.samples,
            "samples_per_s": self.samples / seconds if seconds else 0.0,
            "turns": self.rates,
            "tried": len(kills),
            "survived": len(times),
            "wrong": line.n_wrong,
            "hang": self.hangs,
            "error": self._n_errors - self.hangs,
            "jobs": line.job + 1,
            "planned_restarts": self.planned,
            "repeated": line.repeated,
            "lost_median": float(np.median(lost)) if lost else 0.0,
            "residuals_compared": line.balanced,
            "residuals_not_compared": line.unbalanced,
            **{f"p{part}_s": float(np.percentile(found, part)) if times else None for part in (50, 99)},
            "max_s": float(found.max()) if times else None,
            "kill_seconds": times,
            "seconds_lost": lost_s,
            "part_kept": part_kept(lost_s, seconds) if seconds else None,
            "restart_seconds": self.restart_seconds,
            "save_median_s": float(np.median(line.save_seconds)) if line.save_seconds else None,
            "texts": line.wrong,
            "errors": self.errors,
        }

    def _seconds_lost(self) -> list[float | None]:
        """Return the seconds of this way's turns that each kill cost; None where they are not known."""
        at, window = self.clock.at, WINDOW * self._every_s
        times, counts = zip(*self.timeline.commits, strict=True) if self.timeline.commits else ((), ())
        commits = Commits(self.clock.at_each(np.array(times)), counts)
        found: list[float | None] = []
        for kill in self.timeline.kills:
            if kill.settled is None or at(kill.settled) + 2 * window > self.clock.now:
                found.append(None)
            else:
                found.append(seconds_lost(commits, at(kill.time), at(kill.settled), window))
        return found

    def _seconds_of(self, kill: Kill) -> float:
        assert kill.recovered is not None
        return self.clock.at(kill.recovered) - self.clock.at(kill.time)


def write_data(name: str, folder: Path) -> None:
    """Write the first training samples of a dataset as arrays, which all ranks map into their memory."""
    from apps.train.data import load

    train = load(name).train
    np.save(folder / "images.npy", train.images[:N_SAMPLES].numpy())
    np.save(folder / "labels.npy", train.labels[:N_SAMPLES].numpy())


def campaign(
    training: Training, seconds: Mapping[str, float], turn_s: float, every_s: float, seed: int, folder: Path,
    report: Callable[[Record], None],
) -> Record:  # fmt: skip
    """Make a training in each way for its seconds, in turns of at most `turn_s`; return the last record."""
    write_data(training.dataset, folder)
    env = mpi_environment()
    ways = [Way(name, training, folder / name, folder, env, every_s, seed) for name in seconds]
    # a way with fewer seconds has shorter turns
    rounds = math.ceil(max(seconds.values()) / turn_s)
    loads: list[float] = []
    try:
        for way in ways:
            way.prepare()
        for _ in range(rounds):
            for way in ways:
                way.take_turn(seconds[way.name] / rounds)
                loads.append(os.getloadavg()[0])
            report(summary(training, ways, every_s, seed, loads))
        for way in ways:
            way.finish()
        return summary(training, ways, every_s, seed, loads)
    finally:
        for way in ways:
            way.close()


def summary(training: Training, ways: Sequence[Way], every_s: float, seed: int, loads: Sequence[float]) -> Record:
    """Return the figures of all ways, relative to the undisturbed one where it is among them."""
    found = {way.name: way.record() for way in ways}
    mark = min(way.timeline.samples for way in ways)
    for way in ways:
        found[way.name]["loss"] = way.timeline.loss_at(mark)
    if (undisturbed := found.get("undisturbed")) is not None and undisturbed["samples"]:
        for one in found.values():
            one["goodput"] = one["samples_per_s"] / undisturbed["samples_per_s"]
            one["is_in_band"] = bool(one["loss"] <= undisturbed["loss"] + LOSS_BAND)
    return {
        "training": asdict(training),
        "every_s": every_s,
        "seed": seed,
        "loss_samples": mark,
        "loss_band": LOSS_BAND,
        "ways": found,
        "loads": [float(np.median(loads)), max(loads)],
        "environment": environment(),
    }


def failures(record: Record) -> list[str]:
    """Return the failures, a text each."""
    found = []
    for name, way in record["ways"].items():
        found += [f"{name}: {text}" for text in (*way["texts"], *way["errors"])]
        if way["survived"] < way["tried"]:
            found.append(f"{name}: {way['tried'] - way['survived']} kills were not survived")
        if not way.get("is_in_band", True):
            found.append(f"{name}: the loss {way['loss']:.4f} is worse than the undisturbed one")
    return found


HEADINGS = (
    "way", "goodput", "time kept", "samples/s", "kills tried", "survived", "wrong results", "hangs", "other errors",
    "kill to next step, p50 / p99 / max, s", "steps repeated", "jobs", "residual lost, median", "loss",
)  # fmt: skip


def table(record: Record) -> str:
    """Return a record as a table."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"| --- | {' | '.join(['---:'] * (len(HEADINGS) - 1))} |"]
    for name, way in record["ways"].items():
        times = " / ".join("-" if way[key] is None else f"{way[key]:.2f}" for key in ("p50_s", "p99_s", "max_s"))
        goodput, kept = (
            "-" if part is None else f"{100 * part:.1f} %" for part in (way.get("goodput"), way["part_kept"])
        )
        cells = (
            name, goodput, kept, f"{way['samples_per_s']:,.0f}", way["tried"],
            way["survived"], way["wrong"], way["hang"], way["error"], times, f"{way['repeated']:,}", way["jobs"],
            f"{100 * way['lost_median']:.0f} %", f"{way['loss']:.3f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
