"""Training runs of the learning study: which there are, and starting those that are not done."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.launch import PROJECT, mpi_environment, python_command, run

GLOBAL_BATCH = {"digits": 64, "fashion-mnist": 256}
# The digits' 40 epochs were chosen after 20 had been seen to miss the targets: docs/performance-tables.md has both.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "digits": ("--hidden", "128", "--epochs", "40", "--warmup-epochs", "1", "--decay", "cosine"),
    "fashion-mnist": ("--hidden", "256", "--epochs", "5", "--warmup-epochs", "0.25", "--decay", "cosine"),
}
METHODS: Mapping[str, tuple[str, ...]] = {
    "dense": ("--algorithm", "dense"),
    "Marsit, K = 100": ("--algorithm", "marsit", "--full-precision-every", "100"),
    "Marsit, K = none": ("--algorithm", "marsit", "--full-precision-every", "none"),
    '"paper", K = 100': ("--algorithm", "marsit", "--full-precision-every", "100", "--residual", "paper"),
    "K = 1": ("--algorithm", "marsit", "--full-precision-every", "1"),
    "cascading": ("--algorithm", "cascading-ssdm"),
    "cascading, normalised": ("--algorithm", "cascading-ssdm", "--option", "normalise=True"),
}
LONGEST_S = 1800.0


@dataclass(frozen=True)
class Run:
    """One training run."""

    dataset: str
    ranks: int
    optimizer: str
    lr: float
    method: str
    seed: int

    def path(self, folder: Path) -> Path:
        """Where its record goes."""
        method = "".join(letter if letter.isalnum() else "-" for letter in self.method.lower())
        return folder / f"{self.dataset}-{self.ranks}-{self.optimizer}-{self.lr:g}-{method}-{self.seed}.json"

    def arguments(self, path: Path, extra: Sequence[str]) -> list[str]:
        """Of ``apps.train``; of options given twice the last counts."""
        chosen = {
            "dataset": self.dataset,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "seed": self.seed,
            "json": str(path),
        }
        options = [text for key, value in chosen.items() for text in (f"--{key}", str(value))]
        batch = max(1, GLOBAL_BATCH[self.dataset] // self.ranks)
        fixed = ["--topology", "ring", "--batch", str(batch), *SETTINGS[self.dataset]]
        return [*fixed, *options, *METHODS[self.method], *extra]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: test accuracy after the last epoch, None where it diverged; bits an element and phase."""

    accuracy: float | None
    bits_per_element: float | None


def outcome(path: Path) -> Outcome | None:
    """What a record says; None if there is none or its run did not come to an end."""
    try:
        last: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
    if last["kind"] == "diverged":
        return Outcome(None, None)
    return Outcome(last["accuracy"], last["bits_per_element"]) if last["kind"] == "result" else None


def run_all(
    runs: Sequence[Run], folder: Path, extra: Sequence[str] = (), budget_s: float | None = None
) -> dict[Run, Outcome]:
    """Train what is not trained yet, in order.

    Parameters
    ----------
    runs : sequence of Run
    folder : Path
        Of the records.
    extra : sequence of str
        Further options of ``apps.train``.
    budget_s : float, optional
        No job starts after so many seconds.

    Returns
    -------
    dict
        Of the runs that ended, now or before.

    Raises
    ------
    RuntimeError
        A run failed otherwise than by diverging; says what it printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env, started = mpi_environment(), time.monotonic()
    missing = [one for one in runs if outcome(one.path(folder)) is None]
    for (seed, dataset, ranks), group in itertools.groupby(missing, lambda one: (one.seed, one.dataset, one.ranks)):
        if budget_s is not None and time.monotonic() - started > budget_s:
            break
        begun, batch = time.monotonic(), list(group)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as listed:
            json.dump([one.arguments(one.path(folder), extra) for one in batch], listed)
            listed.flush()
            arguments = ["-m", "apps.performance.batch", listed.name]
            command = python_command(ranks, arguments)
            status, output = run(command, env, cwd=PROJECT, timeout_s=LONGEST_S * len(batch))
        failed = next((one for one in batch if outcome(one.path(folder)) is None), None)
        if status or failed:
            raise RuntimeError(f"{failed} ended with status {status}: {output.strip()[-2000:]}")
        seconds = time.monotonic() - begun
        print(
            f"seed {seed}, {dataset}, {ranks} ranks: {len(batch)} runs in {seconds:.0f} s", file=sys.stderr, flush=True
        )
    ended = {one: outcome(one.path(folder)) for one in runs}
    return {one: end for one, end in ended.items() if end is not None}
