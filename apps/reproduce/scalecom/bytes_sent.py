"""ScaleCom's Figure 1b: what is sent as ranks are added, measured over MPI; and rates by layer, and what they save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim
from apps.reproduce.mpi_jobs import on_this_machine
from apps.reproduce.results import Book
from apps.train.models import build
from mpicomp.torch.buckets import NamedParameter, make_buckets
from mpicomp.torch.layer_rates import bucket_rates, compression_rates

JOB = "apps.reproduce.scalecom.job"
RATE = 112  # as in the paper's figure
ELEMENTS = 1 << 18
STEPS = 2
RANKS = (2, 4, 8, 16)
GUIDED_RANKS = 4
EXAMPLES = 32  # of a rank: what the guidance is for
SHAPES: dict[str, tuple[tuple[int, int, int], int | None]] = {
    "mlp": ((1, 28, 28), None),
    "cnn": ((1, 8, 8), 32),
    "resnet8": ((1, 8, 8), 8),
    "resnet20": ((1, 28, 28), None),
}
"""Models with their images and width: those of this study, and a larger one."""


def volume(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Bytes by number of ranks of dense, ScaleCom and local top-k."""
    ranks = (*RANKS, 32) if full else RANKS
    names = {"dense": "dense", "ScaleCom": "scalecom", "local top-k": "local-top-k"}
    methods = {
        name: {"name": key, "n": ELEMENTS, "options": {} if name == "dense" else {"rate": RATE}, "segments": None}
        for name, key in names.items()
    }
    found = {m: _over_mpi(book, f"bytes-{m}", m, methods) for m in ranks}
    less = {name: [found[m]["dense"]["bytes"] / found[m][name]["bytes"] for m in ranks] for name in list(names)[1:]}
    grown = {name: found[8][name]["bytes"] / found[2][name]["bytes"] for name in names}
    lines = [Curve(name, ranks, [[found[m][name]["bytes"] / 1024 for m in ranks]]) for name in names]
    drawn = [
        curves(book.folder / "bytes.png", lines, "ranks", "KiB that a rank sends per step", log=True),
        curves(
            book.folder / "compression.png",
            [Curve(name, ranks, [values]) for name, values in less.items()],
            "ranks",
            "times less than dense",
        ),
    ]
    differs = (
        f"bytes handed to MPI, mean over ranks, ring all-reduce instead of a parameter server; {ELEMENTS} elements, "
        f"{RATE}x, ranks {', '.join(map(str, ranks))} on one machine"
    )
    return [
        Claim(
            "Fig. 1",
            "local top-k: compression falls as ranks are added",
            "volume grows linearly with workers",
            f"{_list(less['local top-k'])} times less than dense; from 2 to 8 ranks its bytes grow "
            f"{grown['local top-k']:.2f}-fold, dense's {grown['dense']:.2f}-fold",
            grown["local top-k"] > 3 * grown["dense"],
            differs + "; judged: 3 times as much growth as dense",
        ),
        Claim(
            "Fig. 1, Table 1",
            "ScaleCom: compression does not depend on the number of ranks",
            "constant",
            f"{_list(less['ScaleCom'])} times less than dense; its bytes grow {grown['ScaleCom']:.2f}-fold",
            max(less["ScaleCom"]) < 1.05 * min(less["ScaleCom"]),
            differs + "; judged: within 5 %",
        ),
        Claim(
            "Fig. 1a",
            "the ranks' own choices build up: elements of the result",
            "up to M times as many",
            f"local top-k {_list([RATE * found[m]['local top-k']['filled'] for m in ranks])} times n / "
            f"{RATE}, ScaleCom {_list([RATE * found[m]['ScaleCom']['filled'] for m in ranks])}",
            None,
            differs + "; made gradients, half of whose variance or more all ranks share",
        ),
    ], drawn


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _over_mpi(book: Book, name: str, ranks: int, methods: Mapping[str, Record]) -> Record:
    request = {"steps": STEPS, "methods": dict(methods)}
    return book.record(name, {**request, "ranks": ranks}, lambda: on_this_machine(ranks, JOB, request))


def guidance(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Section 4: rates by multiply-adds for each gradient, and what comes of them."""
    guides = {name: guided(name) for name in SHAPES}
    methods: dict[str, Record] = {}
    for name, guide in guides.items():
        common = {"n": guide["n"], "segments": guide["segments"]}
        methods[name] = {**common, "name": "scalecom", "options": {"rates": guide["rates"]}}
        methods[f"{name}, dense"] = {**common, "name": "dense", "options": {}}
    found = _over_mpi(book, "guidance", GUIDED_RANKS, methods)
    claims = []
    for name, guide in guides.items():
        (channels, height, width), _ = SHAPES[name]
        layers = ", ".join(f"{rate}x {count}" for rate, count in guide["elements"].items())
        saved = found[f"{name}, dense"]["bytes"] / found[name]["bytes"]
        claims.append(
            Claim(
                "Sec. 4",
                f"guided rates of {name}, {channels} x {height} x {width}",
                "25x, 50x or 400x a layer; 92x to 400x in all",
                f"elements at {layers}: {guide['kept']:.0f}x fewer values, {saved:.0f}x fewer bytes",
                None,
                f"reported; bytes over MPI, {GUIDED_RANKS} ranks, indices and some 100 bytes of checks a step included",
            )
        )
    return claims, []


def guided(name: str) -> Record:
    """A model's rates by the guidance.

    Returns
    -------
    dict
        ``n`` and ``segments``: of the bucket. ``rates``: as `mpicomp.ScaleCom` takes them. ``elements``: how many have
        each rate. ``kept``: elements for each that is sent.
    """
    shape, width = SHAPES[name]
    model = build(name, shape, 10, None, width)
    rates = compression_rates(model, [torch.zeros(EXAMPLES, *shape)])
    named = dict(model.named_parameters())
    (bucket,) = make_buckets([NamedParameter(key, parameter) for key, parameter in named.items()], 25)
    elements: dict[str, int] = {}
    for key, rate in sorted(rates.items(), key=lambda item: item[1]):
        elements[str(rate)] = elements.get(str(rate), 0) + named[key].numel()
    sent = sum(-(-parameter.numel() // rates[key]) for key, parameter in named.items())
    return {
        "n": bucket.n,
        "segments": [parameter.numel() for parameter in named.values()],
        "rates": bucket_rates(named.items(), rates)[0],
        "elements": elements,
        "kept": sum(elements.values()) / sent,
    }
