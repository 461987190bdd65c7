"""Timeline of a training under churn: committed steps, kills, and results that no group of ranks can have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Row = dict[str, Any]
ROUNDING = 1e-4  # of the residuals' magnitude
LAG = 20  # steps behind the newest one, for which no rank writes a line any more
PAUSED_LAG = 2  # the same, once all lines of a paused job have been read
LOSS_STEPS = 100  # over which a loss is averaged
MOST_WRONG = 40  # texts kept


@dataclass
class Kill:
    """A kill, by the clock of the ranks' lines."""

    rank: int  # at the start of the job
    time: float  # of the signal
    job: int
    last_step: int  # that any rank had committed
    lost: float  # part of the residuals' magnitude that died with the rank
    recovered: float | None = None  # when the last of the other ranks had committed its next step; None: not yet
    settled: float | None = None  # the same, or the time of the first step after a restart that followed


@dataclass
class Step:
    """A committed step: samples in it, mean loss, checksum of the model, and the projection of each rank's residual."""

    samples: int
    loss: float
    digest: int
    residuals: dict[int, float]
    size: float


@dataclass
class Timeline:
    """Steps of one training, over all of its jobs."""

    batch: int  # samples of a rank and step
    # residuals after a step are those before, plus the vectors, less the results
    is_balanced: bool
    steps: list[Step] = field(default_factory=list)  # a restart replaces those behind its checkpoint
    kills: list[Kill] = field(default_factory=list)
    # time of a step's last line, and its samples; or that of a kill, and minus the samples of steps given up
    commits: list[tuple[float, int]] = field(default_factory=list)
    repeated: int = 0  # steps made again after a restart
    balanced: int = 0  # steps whose residuals were compared
    unbalanced: int = 0  # those without the dead rank's line
    n_wrong: int = 0
    wrong: list[str] = field(default_factory=list)  # results that cannot be
    save_seconds: list[float] = field(default_factory=list)
    is_short: bool = False
    last_time: float = 0.0
    job: int = -1

    def __post_init__(self) -> None:
        self._open: dict[int, dict[int, Row]] = {}  # steps whose lines may be incomplete, with the lines by rank
        self._newest = -1
        self._before: dict[int, tuple[int, float]] = {}  # next step and residual of each rank
        self._next: dict[int, int] = {}  # next step of each rank
        self._restored: dict[int, Row] = {}
        self._saved_by: tuple[int, ...] = ()  # ranks of the job before that wrote the checkpoint

    @property
    def samples(self) -> int:
        """Samples of all steps on which the model depends."""
        return sum(step.samples for step in self.steps)

    @property
    def newest(self) -> int:
        """Newest step of the job; -1 before the first one."""
        return self._newest

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that train now, as the newest line states them; empty before the first step of a job."""
        return tuple(next(reversed(self._open[self._newest].values()))["members"]) if self._open else ()

    @property
    def pending(self) -> Kill | None:
        """The last kill, if no step has been committed after it."""
        return self.kills[-1] if self.kills and self.kills[-1].recovered is None else None

    def begin_job(self, step: int, members: Sequence[int] = ()) -> None:
        """Start a job, with numbers of ranks of its own, from a checkpoint of these members after so many steps."""
        self.job += 1
        if self.kills:
            self.kills[-1].settled = None
        given_up = self.steps[step:]
        if given_up:
            when = self.kills[-1].time if self.kills else self.last_time
            self.commits.append((when, -sum(one.samples for one in given_up)))
        self.repeated += len(given_up)
        del self.steps[step:]
        self.is_short = False
        self._newest = -1
        self._before, self._next, self._restored = {}, {}, {}
        self._saved_by = tuple(members)

    def end_job(self) -> None:
        """Close all steps of a job that has ended."""
        if (kill := self.pending) is not None:
            kill.last_step = max(kill.last_step, self._newest)
        self._settle(-1)

    def settle(self) -> None:
        """Close all steps but the last ones, after all lines of a paused job have been read."""
        self._settle(PAUSED_LAG)

    def add_kill(self, rank: int, time: float) -> None:
        """Add a kill that has just been made."""
        whole_steps = [rows for rows in self._open.values() if self.members and set(rows) >= set(self.members)]
        rows = whole_steps[-1] if whole_steps else {}
        sizes = {one: row["size"] for one, row in rows.items()}
        whole = sum(sizes.values())
        last = max(self._newest, len(self.steps) - 1)
        self.kills.append(Kill(rank, time, self.job, last, sizes.get(rank, 0.0) / whole if whole else 0.0))

    def add(self, rank: int, row: Row) -> None:
        """Add a line of a rank."""
        if row["kind"] == "step":
            self._add_step(rank, row)
        elif row["kind"] in ("restored", "joined"):
            self._next[rank] = row["step"]
            self._before[rank] = row["step"], row["residual"]
            if row["kind"] == "restored":
                self._restored[rank] = row
                self._require_restored(rank, row)
            elif self.is_balanced and row["size"]:
                self._report(f"job {self.job}, rank {rank}: joined with a residual of {row['size']}")
        elif row["kind"] == "saved":
            self.save_seconds.append(row["seconds"])
        elif row["kind"] == "short":
            self.is_short = True

    def loss_at(self, samples: int) -> float:
        """Return the mean loss of the steps up to so many samples; NaN before the first step."""
        ends = np.cumsum([step.samples for step in self.steps])
        end = bisect_left(ends.tolist(), samples) + 1
        losses = [step.loss for step in self.steps[max(0, end - LOSS_STEPS) : end]]
        return float(np.mean(losses)) if losses else float("nan")

    def _add_step(self, rank: int, row: Row) -> None:
        number = row["step"]
        if number != (expected := self._next.get(rank, 0)):
            self._report(f"job {self.job}, rank {rank}: step {number} follows {expected - 1}")
        self._next[rank] = number + 1
        self._open.setdefault(number, {})[rank] = row
        self._newest = max(self._newest, number)
        self.last_time = max(self.last_time, row["time"])
        kill = self.pending
        if kill is not None and self._is_after(kill, row):
            rows = self._open[number]
            if all(one in rows and self._is_after(kill, rows[one]) for one in row["members"]):
                kill.recovered = kill.settled = max(rows[one]["time"] for one in row["members"])
        if self._newest > 2 * LAG + min(self._open):
            self._settle(LAG)

    def _is_after(self, kill: Kill, row: Row) -> bool:
        if self.job != kill.job:
            return bool(row["step"] > kill.last_step)
        return row["time"] > kill.time and kill.rank not in row["members"]

    def _settle(self, lag: int) -> None:
        for number in sorted(self._open):
            if number <= self._newest - lag or lag < 0:
                self._close(number, self._open.pop(number))

    def _close(self, number: int, rows: dict[int, Row]) -> None:
        digests = {rank: row["digest"] for rank, row in rows.items()}
        if len(set(digests.values())) > 1:
            self._report(f"job {self.job}, step {number}: replicas differ: {digests}")
        if self.is_balanced:
            self._require_restored_residuals()
            self._require_balance(number, rows)
        self._before.update({rank: (number + 1, row["residual"]) for rank, row in rows.items()})
        step = Step(
            self.batch * len(rows),
            float(np.mean([row["loss"] for row in rows.values()])),
            next(iter(digests.values())),
            {rank: row["residual"] for rank, row in rows.items()},
            sum(row["size"] for row in rows.values()),
        )
        if number != len(self.steps):
            self._report(f"job {self.job}: step {number} follows {len(self.steps) - 1}")
            return
        self.steps.append(step)
        when = max(row["time"] for row in rows.values())
        self.commits.append((when, step.samples))
        if self.kills and self.kills[-1].recovered is not None and self.kills[-1].settled is None:
            self.kills[-1].settled = when

    def _require_balance(self, number: int, rows: dict[int, Row]) -> None:
        before = {rank: self._before.get(rank) for rank in rows}
        if any(one is None or one[0] != number for one in before.values()) or any(
            row["vector"] is None for row in rows.values()
        ):
            return
        residuals = sum(one[1] for one in before.values() if one is not None)
        vectors, results, after = (sum(row[key] for row in rows.values()) for key in ("vector", "result", "residual"))
        size = 1 + sum(row["size"] for row in rows.values())
        if abs(residuals + vectors - results - after) <= ROUNDING * size:
            self.balanced += 1
        elif {rank for rank, (step, _) in self._before.items() if step == number} - set(rows):
            # a rank of the step before, or one that has joined since, died in this step before it wrote its line
            self.unbalanced += 1
        else:
            text = f"residuals {after}, not {residuals} + {vectors} - {results}"
            self._report(f"job {self.job}, step {number}: {text}")

    def _require_restored(self, rank: int, row: Row) -> None:
        number = row["step"]
        if number != len(self.steps):
            self._report(f"job {self.job}, rank {rank}: restored step {number}, not {len(self.steps)}")
        elif number and row["digest"] != self.steps[-1].digest:
            self._report(f"job {self.job}, rank {rank}: step {number} was restored with another model")

    def _require_restored_residuals(self) -> None:
        """Compare the mean of the residuals, which any number of ranks keeps, with that of the ranks that saved."""
        rows, self._restored = list(self._restored.values()), {}
        step = self.steps[-1] if self.steps else None
        # a rank may have died between the step and the checkpoint, and its residual is lost
        if not rows or step is None or not self._saved_by or not set(self._saved_by) <= set(step.residuals):
            return
        found = float(np.mean([row["residual"] for row in rows]))
        saved = float(np.mean([step.residuals[rank] for rank in self._saved_by]))
        if abs(found - saved) > ROUNDING * (1 + step.size):
            self._report(f"job {self.job}: the mean residual was restored as {found}, not {saved}")

    def _report(self, text: str) -> None:
        self.n_wrong += 1
        if len(self.wrong) < MOST_WRONG:
            self.wrong.append(text)
