"""DoubleSqueeze's bytes and times over MPI: the two forms, and what a synchronization takes on links of each rate."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from apps.emulator.network import ClusterError
from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim
from apps.reproduce.doublesqueeze.job import DETERMINISTIC
from apps.reproduce.doublesqueeze.learning import BATCH, HIDDEN
from apps.reproduce.doublesqueeze.methods import (
    BUCKET,
    DENSE,
    DS_1BIT,
    DS_TOPK,
    FORMS,
    MEM_1BIT,
    MEM_TOPK,
    METHODS,
    QUANTIZED,
    RANKS,
    SPARSE,
)
from apps.reproduce.mpi_jobs import on_hosts, on_this_machine
from apps.reproduce.results import Book

JOB = "apps.reproduce.doublesqueeze.job"
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "none": "not limited"}
MODEL = 784 * HIDDEN + HIDDEN + HIDDEN * 10 + 10  # elements of the trained model
RESNET_18 = 11_173_962  # with ten classes: the paper's
LARGEST = 25_000_000
REPEATS = 5
WORD = 8  # bytes, at most, in which a rank tells another that its step is finite
EQUAL_STEPS = 5
RIVALS = {DS_1BIT: (DENSE, MEM_1BIT, QUANTIZED), DS_TOPK: (DENSE, MEM_TOPK, SPARSE)}

Times = dict[str, Record]
"""By rate: ``times`` by length, form and method, and ``payload_bits_per_s``."""


def forms(book: Book) -> list[Claim]:
    """Both forms give the same bits, and send the bytes that the codecs' sizes say."""
    request = {"part": "forms", "n": MODEL, "steps": EQUAL_STEPS, "forms": list(FORMS)}
    found = book.record("forms", request, lambda: on_this_machine(RANKS, JOB, request))["forms"]
    server, shards = found["star"], found["ring"]
    equal = [
        name
        for name in DETERMINISTIC
        if (server[name]["digest"], server[name]["errors"]) == (shards[name]["digest"], shards[name]["errors"])
    ]
    words = {
        f"{name} ({FORMS[form]})": word(row, RANKS)
        for form in found
        for name, row in found[form].items()
        if name != DENSE
    }
    said = max(words.values())
    off = [name for name, told in words.items() if told != said or said > WORD]
    off += [f"{DENSE} ({FORMS[form]})" for form in found if word(found[form][DENSE], RANKS)]
    sent = "; ".join(
        f"{FORMS[form]}: " + ", ".join(f"{name} {found[form][name]['busiest'] / 1e3:.1f} kB" for name in METHODS)
        for form in found
    )
    return [
        Claim(
            "algorithm",
            "a server and an owner for each shard compute the same",
            "“not only for parameter servers”",
            f"results of {EQUAL_STEPS} steps and all errors equal bit for bit: {len(equal)} of {len(DETERMINISTIC)} "
            f"({', '.join(equal) or 'none'})",
            len(equal) == len(DETERMINISTIC),
            f"compressors that draw nothing, on the same buckets of {BUCKET}; {RANKS} ranks over MPI, {MODEL} elements",
        ),
        Claim(
            "algorithm",
            "both passes carry codes",
            "formula: (M − 1)(first + second) of all ranks, M (M − 1) first where codes are gathered",
            f"equal to the byte for {2 * len(METHODS) - len(off)} of {2 * len(METHODS)}"
            f"{': not for ' + ', '.join(off) if off else ''}; the busiest rank sends, {sent}",
            not off,
            f"counted over MPI, {MODEL} elements; beside the codes each rank tells each other in {said:g} bytes "
            "whether its step is finite",
        ),
    ]


def word(row: Record, ranks: int) -> float:
    """Bytes that a rank tells each other beside codes and results."""
    return float((row["bytes"] - row["formula"]) / (ranks * (ranks - 1)))


def step_seconds(book: Book) -> float:
    """Forward and backward pass of the trained model, on all ranks at once."""
    request = {"part": "step", "hidden": [HIDDEN], "batch": BATCH, "repeats": 30}
    return float(book.record("step", request, lambda: on_this_machine(RANKS, JOB, request))["median_s"])


def measured(book: Book, full: bool) -> Times | str:
    """Times at each rate; or why there are none."""
    found: Times = {}
    lengths = [MODEL, RESNET_18, *([LARGEST] if full else [])]
    request = {"part": "times", "lengths": lengths, "forms": list(FORMS), "repeats": REPEATS}
    for rate in RATES:
        name, settings = f"times-{rate}{'-full' if full else ''}", {**request, "rate": rate, "ranks": RANKS}
        try:
            found[rate] = book.record(name, settings, partial(on_hosts, rate, RANKS, JOB, request))
        except ClusterError as error:
            return str(error)
    return found


def seconds(found: Times, rate: str, n: int, form: str, name: str) -> float:
    """Of a synchronization, the median call's on the slowest rank."""
    return float(found[rate]["times"][str(n)][form][name]["median_s"])


def speedups(found: Times, n: int, form: str, ours: str, other: str) -> list[float]:
    """Times by which our synchronization is faster, at each rate."""
    return [seconds(found, rate, n, form, other) / seconds(found, rate, n, form, ours) for rate in found]


def claims_of(found: Times | str, full: bool) -> list[Claim]:
    """Faster than each rival on slow links, and the more so the slower they are."""
    where = "experiments, time against bandwidth"
    if isinstance(found, str):
        return [Claim(where, "DoubleSqueeze is faster on slow links", "curves", "left out", None, found)]
    made = []
    n = LARGEST if full else RESNET_18
    for form, called in FORMS.items():
        for ours, others in RIVALS.items():
            for other in others:
                ratios = dict(zip(found, speedups(found, n, form, ours, other), strict=True))
                texts = ", ".join(f"{ratio:.1f}x at {RATES[rate]}" for rate, ratio in ratios.items())
                made.append(
                    Claim(
                        where,
                        f"{ours} is faster than {other} at 100 Mbit/s, and gains more than at 1 Gbit/s ({called})",
                        "the gap widens as bandwidth falls",
                        texts,
                        ratios["100mbit"] > max(1.0, ratios["1gbit"]),
                        f"time of a synchronization of {n / 1e6:.1f} M elements alone, {RANKS} emulated hosts on the "
                        "processors of one machine, where computing the codes takes longer than on hosts of their own",
                    )
                )
    return made


def draw(found: Times | str, folder: Path, full: bool) -> list[Path]:
    """Time of a synchronization, and DoubleSqueeze's gain, against what a link carries."""
    if isinstance(found, str):
        return []
    drawn = []
    n = LARGEST if full else RESNET_18
    carried = [record["payload_bits_per_s"] / 1e6 for record in found.values()]
    for form, called in FORMS.items():
        taken = [Curve(name, carried, [[seconds(found, rate, n, form, name) for rate in found]]) for name in METHODS]
        gains = [
            Curve(f"{ours} over {other}", carried, [speedups(found, n, form, ours, other)])
            for ours, others in RIVALS.items()
            for other in others
        ]
        x_label = f"Mbit/s that a link carries ({called})"
        name = called.replace(" ", "-")
        for what, lines, y_label in (("seconds", taken, "seconds a synchronization"), ("gain", gains, "times faster")):
            drawn.append(curves(folder / f"{what}-{name}.png", lines, x_label, y_label, log=True, log_x=True))
    return drawn
