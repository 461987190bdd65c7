"""Figure 1b and section 4 of ScaleCom: bytes as ranks are added, measured over MPI; rates by layer and their bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from apps.mpi_jobs import call_on_ranks
from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim
from apps.reproduce.scalecom.job import measure_all
from apps.studies.results import Results
from apps.train.models import build
from mpicomp.torch.buckets.bucket_layout import make_bucket
from mpicomp.torch.layer_rates import compression_rates
from mpicomp.torch.parameters import NamedParameter

RATE = 112  # as in the paper's figure
ELEMENTS = 1 << 18
STEPS = 2
RANKS = (2, 4, 8, 16)
GUIDED_RANKS = 4
EXAMPLES = 32  # of a rank, on which the guidance depends
SHAPES: dict[str, tuple[tuple[int, int, int], int | None]] = {
    "mlp": ((1, 28, 28), None),
    "cnn": ((1, 8, 8), 32),
    "resnet8": ((1, 8, 8), 8),
    "resnet20": ((1, 28, 28), None),
}
"""Models, the shape of their images and their width."""


def volume(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Measure the bytes of dense, ScaleCom and local top-k by the number of ranks."""
    ranks = (*RANKS, 32) if full else RANKS
    names = {"dense": "dense", "ScaleCom": "scalecom", "local top-k": "local-top-k"}
    methods = {
        name: {"name": key, "n": ELEMENTS, "options": {} if name == "dense" else {"rate": RATE}}
        for name, key in names.items()
    }
    found = {m: _over_mpi(results, f"bytes-{m}", m, methods) for m in ranks}
    less = {name: [found[m]["dense"]["bytes"] / found[m][name]["bytes"] for m in ranks] for name in list(names)[1:]}
    grown = {name: found[8][name]["bytes"] / found[2][name]["bytes"] for name in names}
    lines = [Curve(name, ranks, [[found[m][name]["bytes"] / 1024 for m in ranks]]) for name in names]
    drawn = [
        curves(results.folder / "bytes.png", lines, "ranks", "KiB per rank and step", log=True),
        curves(
            results.folder / "compression.png",
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
            differs + "; generated gradients, of whose variance all ranks share half or more",
        ),
    ], drawn


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _over_mpi(results: Results, name: str, ranks: int, methods: dict[str, Record]) -> Record:
    arguments = {"steps": STEPS, "methods": methods}
    call = partial(call_on_ranks, measure_all, arguments, ranks)
    return results.get(name, {**arguments, "ranks": ranks}, call)


def guidance(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Measure the bytes at the rates that section 4 recommends by multiply-adds per gradient."""
    guides = {name: guided(name) for name in SHAPES}
    methods: dict[str, Record] = {}
    for name, guide in guides.items():
        vector = {"n": guide["n"], "tensor_lengths": guide["tensor_lengths"]}
        methods[name] = {**vector, "name": "scalecom", "options": {"rates": guide["rates"]}}
        methods[f"{name}, dense"] = {**vector, "name": "dense", "options": {}}
    found = _over_mpi(results, "guidance", GUIDED_RANKS, methods)
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
    """The recommended rates of a model.

    Returns
    -------
    dict
        ``n`` and ``tensor_lengths`` of the bucket; ``rates``: as `mpicomp.ScaleCom` takes them; ``elements``: number
        of elements by rate; ``kept``: all elements divided by those that are sent.
    """
    shape, width = SHAPES[name]
    model = build(name, shape, 10, None, width)
    rates = compression_rates(model, [torch.zeros(EXAMPLES, *shape)])
    named = dict(model.named_parameters())
    bucket = make_bucket(0, [NamedParameter(key, parameter) for key, parameter in named.items()])
    elements: dict[str, int] = {}
    for key, rate in sorted(rates.items(), key=lambda item: item[1]):
        elements[str(rate)] = elements.get(str(rate), 0) + named[key].numel()
    sent = sum(-(-parameter.numel() // rates[key]) for key, parameter in named.items())
    return {
        "n": bucket.n,
        "tensor_lengths": [parameter.numel() for parameter in named.values()],
        "rates": tuple(rates[key] for key, parameter in named.items() if parameter.numel()),
        "elements": elements,
        "kept": sum(elements.values()) / sent,
    }
