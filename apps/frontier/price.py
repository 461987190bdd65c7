"""Price of compression: held-out loss above that of the exact mean of the same steps, seed by seed.

The character model, its text and its batches are those of `apps.reproduce.diloco`. A case is compared with the dense
average of the same number of ranks and local steps at the same learning rate, on the same seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from apps.launch import PROJECT
from apps.pipeline.text import load
from apps.records import Record
from apps.reproduce.diloco import BATCH, CHARACTERS, EVALUATED, SHAPE, STEPS, train_replica
from apps.studies.parallel import run_seeds
from apps.studies.results import Results, slug
from collectives import Communicator
from collectives.schedules.registry import TopologyName
from collectives.threads.run_local import run_local
from mpicomp import Dense, DoubleSqueeze, Marsit, Relay
from mpicomp.algorithms import Algorithm

PAGE = PROJECT / "docs" / "relay-record.md"
DENSE = "dense"
METHODS: Mapping[str, Algorithm] = {
    DENSE: Dense(),
    "Marsit": Marsit(None, gamma=2.0, clip=1.0),
    "Relay(2, copy)": Relay(2, 256, residual="copy"),
    "Relay(3)": Relay(3),
    "Relay(4)": Relay(4),
    "Relay(16)": Relay(16),
    "DoubleSqueeze(4 levels)": DoubleSqueeze("levels:levels=4,bucket=128"),
}
RATES = {"updates": 2e-3, "gradients": 4e-3}
"""Learning rates that `apps.reproduce.diloco` tuned for the exact mean, on a seed of its own."""


@dataclass(frozen=True)
class Case:
    """A method with its local steps; 0: the gradients of each step are averaged."""

    method: str
    local_steps: int
    ranks: int = 4
    topology: TopologyName = "ring"

    @property
    def mode(self) -> str:
        """The optimizer's `synchronize`."""
        return "updates" if self.local_steps else "gradients"

    @property
    def exact(self) -> Case:
        """The dense average of the same steps."""
        return replace(self, method=DENSE, topology="ring")


LOCAL = ("Marsit", "Relay(2, copy)", "Relay(3)", "Relay(4)", "DoubleSqueeze(4 levels)")
OF_GRADIENTS = ("Marsit", "Relay(4)", "Relay(16)")
CASES = (
    *(Case(method, steps) for steps in (10, 30, 100) for method in LOCAL),
    *(Case(method, 0) for method in OF_GRADIENTS),
    *(Case(method, 10, 8, "halving-doubling") for method in ("Relay(2, copy)", "Relay(3)", "Relay(4)")),
    Case("Relay(4)", 10, 8),
    Case("Relay(4)", 10, 16, "halving-doubling"),
)


def run(case: Case, seed: int, steps: int) -> Record:
    """Train on ranks that are threads, which send the bytes of processes; return rank 0's record."""
    torch.set_num_threads(1)
    corpus = load(None, CHARACTERS, SHAPE.context)
    options: dict[str, Any] = {"synchronize": case.mode}
    if case.local_steps:
        options["local_steps"] = case.local_steps

    def rank(comm: Communicator) -> Record:
        torch.set_num_threads(1)  # of this thread: the ranks are the parallel part
        return train_replica(comm, corpus, METHODS[case.method], options, RATES[case.mode], seed, steps)

    return run_local(case.ranks, rank, case.topology, timeout=600)[0]


def kept(results: Results, case: Case, seed: int, steps: int) -> Record:
    """Return the record of a run from the folder of results, and make a missing one."""
    settings = {"algorithm": repr(METHODS[case.method]), "local_steps": case.local_steps, "lr": RATES[case.mode]}
    settings |= {"steps": steps, "shape": repr(SHAPE), "ranks": case.ranks, "topology": case.topology, "batch": BATCH}
    settings |= {"characters": CHARACTERS, "warmup_steps": steps // 20}
    name = f"{slug(case.method)}-{case.local_steps}-{case.ranks}-{case.topology}-{steps}-{seed}"
    return results.get(name, settings, partial(run, case, seed, steps))


def study(results: Results, seeds: int, quick: bool) -> Record:
    """Train by every method; return settings and, for each case, losses and bytes seed by seed."""
    cases = [case for case in CASES if case.ranks == 4] if quick else list(CASES)
    steps = EVALUATED if quick else STEPS
    every = dict.fromkeys(one for case in cases for one in (case.exact, case))
    found = run_seeds(every, seeds, lambda case, seed: partial(kept, results, case, seed, steps))
    rows = [_row(case, found[case], found[case.exact]) for case in cases]
    return {"steps": steps, "seeds": seeds, "shape": repr(SHAPE), "batch": BATCH, "rates": RATES, "rows": rows}


def _row(case: Case, ours: Sequence[Record], exact: Sequence[Record]) -> Record:
    last, theirs = ([record["losses"][-1] for record in records] for records in (ours, exact))
    return {
        "method": case.method,
        "algorithm": repr(METHODS[case.method]),
        "local_steps": case.local_steps,
        "ranks": case.ranks,
        "topology": case.topology,
        "losses": last,
        "exact": theirs,
        "price": float(np.mean(np.subtract(last, theirs))),
        "bytes": ours[0]["bytes"],
        "bytes_exact": exact[0]["bytes"],
    }


def table(record: Record) -> str:
    """Return the rows as Markdown: local steps on 4 ranks, then other ranks and gradients."""
    rows = record["rows"]
    few = [row for row in rows if row["ranks"] == 4 and row["local_steps"]]
    steps = sorted({row["local_steps"] for row in few})
    lines = [f"| updates, 4 ranks | fewer bytes | {' | '.join(f'H = {one}' for one in steps)} |"]
    lines.append("|---|---:|" + "---|" * len(steps))
    for method in dict.fromkeys(row["method"] for row in few):
        of_steps = {row["local_steps"]: row for row in few if row["method"] == method}
        cells = [_price(of_steps[one]) for one in steps]
        lines.append(f"| {method} | {_fewer(of_steps[steps[0]])} | {' | '.join(cells)} |")
    lines += ["", "| others | fewer bytes | price |", "|---|---:|---|"]
    for row in rows:
        if row not in few:
            what = f"H = {row['local_steps']}, {row['ranks']} ranks, {row['topology']}"
            what = what if row["local_steps"] else "gradients of every step, 4 ranks"
            lines.append(f"| {row['method']}, {what} | {_fewer(row)} | {_price(row)} |")
    return "\n".join(lines) + "\n"


def _price(row: Record) -> str:
    each = np.subtract(row["losses"], row["exact"])
    return f"{each.mean():+.3f} ({each.min():+.3f} to {each.max():+.3f})"


def _fewer(row: Record) -> str:
    return f"{row['bytes_exact'] / row['bytes']:.1f}"
