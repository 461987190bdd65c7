"""Figure 4: losses against time on slow links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from apps.emulator.network import ClusterError
from apps.pipeline.options import Options
from apps.plotting import Curve, panels
from apps.records import Record
from apps.reproduce.aq_sgd.runs import FP32, MOST, by_epoch, how_many, losses, shrink
from apps.reproduce.aq_sgd.step_times import (
    FIRST,
    LATER,
    epoch_ends,
    measured,
    modelled_s,
    reached_s,
)
from apps.reproduce.aq_sgd.variations import DEEP, DIRECT, OURS, deep
from apps.reproduce.claims import Claim, paired, time_to_goal
from apps.reproduce.marsit.step_time import BUSY
from apps.studies.results import Results

RATES = {"100mbit": "100 Mbit/s"}
RATES_FULL = RATES | {"10mbit": "10 Mbit/s"}
"""The paper's slowest links, and links on which messages outweigh computing here as they do there."""
TIMED_CHARACTERS = 6_000
MARGIN = MOST[4, 8]
"""Nats above the last loss of float32 at which that loss counts as reached."""
SPEEDUP = 4.3
BEHIND = 0.15
"""How much longer than DirectQ's a step of AQ-SGD may take."""
TIMED: Mapping[str, Options] = {
    "fp32": replace(DEEP, forward_bits=FP32.forward_bits, backward_bits=FP32.backward_bits),
    DIRECT: replace(DEEP, direct=True),
    OURS: DEEP,
}


def figure_4(results: Results, seeds: int, full: bool, quick: bool = False) -> tuple[list[Claim], list[Path]]:
    """Set losses by epoch against the seconds that steps take on links of each rate."""
    many = how_many(seeds, full, quick)
    found = deep(results, many, quick)
    timed = {name: asdict(replace(options, characters=TIMED_CHARACTERS)) for name, options in TIMED.items()}
    claims, grid = [], []
    for rate, called in (RATES_FULL if full else RATES).items():
        try:
            costs = measured(results, "step-times", timed, DEEP.stages, rate)
        except (ClusterError, FileNotFoundError) as error:
            left_out = f"no slow links can be emulated here: {error}"
            what = f"AQ-SGD reaches float32's loss sooner at {called}"
            claims.append(Claim("Fig. 4", what, f"{SPEEDUP} times sooner", "not run", None, left_out))
            continue
        by_model = costs["others_use"] > BUSY
        seconds = {
            name: {epoch: _step_s(costs, name, epoch, options, by_model) for epoch in (FIRST, LATER)}
            for name, options in TIMED.items()
        }
        runs = {name: by_epoch(found[name]) for name in TIMED}
        steps = _steps(shrink(DEEP, quick))
        ends = {
            name: epoch_ends(of_one[FIRST], of_one[LATER], len(runs[name][0]), steps)
            for name, of_one in seconds.items()
        }
        differs = (
            f"character model of {DEEP.layers} blocks in {DEEP.stages} stages, {many} seeds; "
            + _source(costs, by_model)
            + f"; reached: within {MARGIN} nats of float32's last loss with the same seed"
        )
        claims += _judge(runs, ends, seconds, [loss + MARGIN for loss in losses(found["fp32"])], called, differs)
        grid.append((called, [Curve(name.split(",")[0], ends[name], of_one) for name, of_one in runs.items()]))
    if not grid:
        return claims, []
    path = results.folder / "against-time.png"
    return claims, [panels(path, [grid], "seconds", "validation loss, nats a character", legends=True)]


def _steps(options: Options) -> int:
    """Steps of an epoch: a tenth of the sequences is held out."""
    sequences = (options.characters - 1) // options.context
    return (sequences - sequences // 10) // options.batch


def _step_s(costs: Record, name: str, epoch: str, options: Options, by_model: bool) -> float:
    cost = costs["costs"][name][epoch]
    return modelled_s(cost, options, costs["payload_bits_per_s"]) if by_model else float(cost["elapsed_s"])


def _source(costs: Record, by_model: bool) -> str:
    """Source of the seconds of a step, and the seconds of float32 and AQ-SGD by the other way."""
    carried = f"links that carried {costs['payload_bits_per_s'] / 1e6:.3g} Mbit/s between {DEEP.stages} emulated hosts"
    other = ", ".join(
        f"{name.split(',')[0]} {1e3 * _step_s(costs, name, LATER, TIMED[name], not by_model):.0f} ms"
        for name in ("fp32", OURS)
    )
    if by_model:
        return (
            f"seconds of a step by the simulator of schedules, from processor time and bytes measured on {carried}, a "
            f"processor for each stage; other programs used {costs['others_use']:.1f} processors, so that times on the "
            f"wall are not judged: {other}"
        )
    return f"seconds of a step measured on {carried}, which share the processors of this machine; modelled: {other}"


def _judge(
    runs: Mapping[str, list[list[float]]],
    ends: Mapping[str, list[float]],
    seconds: Mapping[str, Mapping[str, float]],
    goals: Sequence[float],
    called: str,
    differs: str,
) -> list[Claim]:
    at = {
        name: [reached_s(goal, run, ends[name]) for goal, run in zip(goals, of_one, strict=True)]
        for name, of_one in runs.items()
    }
    spent = {name: [ends[name][-1] if one is None else one for one in of_one] for name, of_one in at.items()}
    missed = {name: sum(one is None for one in of_one) for name, of_one in at.items()}
    shown = ", ".join(f"{name.split(',')[0]} {time_to_goal(of_one, missed[name])}" for name, of_one in spent.items())
    gain = float(np.mean(spent["fp32"]) / np.mean(spent[OURS]))
    sooner = paired(spent[OURS], spent["fp32"])
    behind = seconds[OURS][LATER] / seconds[DIRECT][LATER] - 1
    by_step = ", ".join(f"{name.split(',')[0]} {1e3 * of_one[LATER]:.0f}" for name, of_one in seconds.items())
    return [
        Claim(
            "Fig. 4",
            f"AQ-SGD reaches float32's loss sooner at {called}",
            "curve leftmost",
            f"{shown}; AQ-SGD less float32 {sooner} s",
            sooner.below and not missed[OURS],
            differs,
        ),
        Claim(
            "Fig. 4",
            f"it does so {SPEEDUP} times sooner at {called}",
            f"{SPEEDUP} times, GPT2-1.5B at 100 Mbit/s",
            f"{gain:.2f} times",
            gain >= SPEEDUP and not missed[OURS],
            f"{differs}; a step of AQ-SGD takes {seconds[OURS][LATER] / seconds['fp32'][LATER]:.2f} of float32's",
        ),
        Claim(
            "Fig. 4",
            f"DirectQ reaches that loss later or never at {called}",
            "diverges or ends higher",
            shown,
            missed[DIRECT] == len(at[DIRECT]) or paired(spent[OURS], spent[DIRECT]).below,
            differs,
        ),
        Claim(
            "Table 2",
            f"a step of AQ-SGD takes as long as one of DirectQ at {called}",
            "3.4 and 3.0 samples a second against 3.5 and 3.0",
            f"ms: {by_step}; AQ-SGD {100 * behind:+.1f} % over DirectQ",
            behind <= BEHIND,
            f"{differs}; judged: at most {BEHIND:.0%} longer",
        ),
    ]
