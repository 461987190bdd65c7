"""Small trainings: accuracy after 15 trainings that average at every step, against dense at the same rate and seed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from apps.launch import PROJECT
from apps.records import Record, read_record
from apps.reproduce.marsit.fixed_rates import DENSE, GRIDS, RATES, FixedRate
from apps.studies.parallel import run_parallel
from apps.studies.results import Results

RECORD = PROJECT / "docs" / "records" / "frontier" / "small-trainings.json"
COLUMNS: Mapping[str, str] = {
    "Relay, updates": "Relay, updates",
    "Relay, gradients": "Relay(16), gradients",
    "K = 1": "exact means of updates",
}
"""Titles of the methods that are compared with dense."""
TRAININGS = [FixedRate(dataset, ranks, *rate, DENSE) for dataset, ranks in GRIDS for rate in RATES]


def study(results: Results, seeds: int, minutes: float = math.inf) -> Record:
    """Add the runs that the record lacks, until `minutes` have passed; return it."""
    deadline = time.time() + 60 * minutes
    known = {_key(run["settings"]): run for run in read_record(RECORD)["runs"]} if RECORD.exists() else {}
    wanted = [
        (replace(one, method=name), seed) for seed in range(seeds) for one in TRAININGS for name in (DENSE, *COLUMNS)
    ]
    missing = {
        case: partial(run, results, *case, deadline) for case in wanted if _key(case[0].settings(case[1])) not in known
    }
    known |= {_key(made["settings"]): made for made in run_parallel(missing).values() if made}
    return {"runs": [known[key] for key in sorted(known)]}


def run(results: Results, training: FixedRate, seed: int, deadline: float) -> Record:
    """Return the run as the record has it; an empty one if the deadline has passed."""
    if time.time() > deadline:
        return {}
    found = training.run(results, seed)()
    seconds = read_record(results.folder / f"{training.name}-{seed}.json")["seconds"]
    bits = found["epochs"][-1]["bits_per_element"] if found["epochs"] else None
    return {
        "settings": training.settings(seed),
        "seconds": seconds,
        "accuracy": found["accuracy"],
        "bits_per_element": bits,
    }


def table(record: Record) -> str:
    """Markdown: dense's accuracy, and mean differences to it over the seeds that all methods have, in points."""
    found = {_key(run["settings"]): 100 * run["accuracy"] for run in record["runs"]}
    seeds = sorted({run["settings"]["seed"] for run in record["runs"]})
    lines = ["| " + " | ".join(["training", "seeds", "dense, %", *COLUMNS.values()]) + " |", "|---" + "|---:" * 5 + "|"]
    for one in TRAININGS:
        cases = [[replace(one, method=name) for name in (DENSE, *COLUMNS)]] * len(seeds)
        points = [
            [found.get(_key(case.settings(seed))) for case in row] for row, seed in zip(cases, seeds, strict=True)
        ]
        whole = np.array([row for row in points if None not in row], float)
        if len(whole):
            title = f"{one.dataset}, {one.ranks} ranks, {one.optimizer} {one.lr:g}"
            lost = [f"{mean:+.2f}".replace("-", "−") for mean in (whole[:, 1:] - whole[:, :1]).mean(axis=0)]
            lines.append("| " + " | ".join([title, str(len(whole)), f"{whole[:, 0].mean():.2f}", *lost]) + " |")
    return "\n".join(lines)


def _key(settings: Record) -> str:
    return json.dumps(settings, sort_keys=True)
