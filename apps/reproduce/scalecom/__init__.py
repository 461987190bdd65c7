"""ScaleCom (Chen et al., NeurIPS 2020, arXiv 2104.11125): accuracy at high rates, and what it rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.networks import Task, trained
from apps.reproduce.parallel import side_by_side
from apps.reproduce.results import Book
from apps.reproduce.scalecom.bytes_sent import guidance, volume
from apps.reproduce.scalecom.leaders import leaders
from apps.reproduce.scalecom.memories import similarity
from mpicomp import Dense, ScaleCom
from mpicomp.algorithms import Algorithm

MARGIN = 0.01  # of accuracy: less than that is no significant loss; the paper's largest is 0.58 points
FEW = 8  # seeds, unless the runs are the long ones
RATES = (65, 100, 400)
MOMENTUM = ((0.003, 40), (0.01, 40), (0.03, 10))
"""Learning rates, a tenth of how far a gradient takes the model in the end, and epochs."""
FEWER = 4  # seeds of these long runs
SGD = ("--optimizer", "sgd")
DECAY = ("--decay", "cosine")  # as the paper's rates fall, too; at a constant one the last epoch's accuracy scatters
FASHION = ("--dataset", "fashion-mnist", "--model", "mlp")
DIGITS = ("--dataset", "digits", "--model", "cnn", "--width", "32")
Method = tuple[Algorithm, tuple[str, ...]]
"""A method and what options of ``apps.train`` it has of its own."""


def run(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """All parts; returns the claims and the figures."""
    claims, figures = [], []
    parts: list[Callable[[Book, int, bool], tuple[list[Claim], list[Path]]]] = [
        accuracy,
        volume,
        similarity,
        leaders,
        large_batch,
        momentum,
        guidance,
    ]
    for part in parts:
        found, drawn = part(book, seeds, full)
        claims += found
        figures += drawn
    return claims, figures


def all_trained(
    book: Book, name: str, task: Task, methods: Mapping[str, Method], seeds: int
) -> dict[str, list[Record]]:
    """Each method's runs, one for each seed, as many at a time as there are processors."""
    runs = [
        partial(trained, book, f"{name}-{method_name.replace(' ', '-')}", task, method, seed, own)
        for method_name, (method, own) in methods.items()
        for seed in range(seeds)
    ]
    found = iter(side_by_side(runs))
    return {method_name: [next(found) for _ in range(seeds)] for method_name in methods}


def compare(
    where: str, what: str, paper: str, found: Mapping[str, list[Record]], ours: str, other: str, differs: str
) -> Claim:
    """The claim that `ours` is as accurate as `other`: surely less than `MARGIN` below it."""
    a, b = ([record["accuracy"] for record in found[name]] for name in (ours, other))
    difference = paired([100 * value for value in a], [100 * value for value in b])
    holds = difference.mean - difference.half_width > -100 * MARGIN
    text = f"{100 * np.mean(a):.2f} % ({other} {100 * np.mean(b):.2f} %); difference {difference} points"
    return Claim(where, what, paper, text, holds, f"{differs}; “as accurate”: surely less than a point below")


def _curves(book: Book, name: str, found: Mapping[str, list[Record]]) -> Path:
    """Test accuracy against epochs; a run that diverged has no end and is left out."""
    lines = []
    for method, records in found.items():
        whole = [[epoch["accuracy"] for epoch in record["epochs"]] for record in records if not record["diverged"]]
        if whole:
            lines.append(Curve(method, range(1, len(whole[0]) + 1), whole))
    return curves(book.folder / f"{name}.png", lines, "epoch", "test accuracy")


def accuracy(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Table 2, Figure 4: as accurate as dense at 65 to 400 times, beta 1, with the settings tuned for dense."""
    claims, drawn = [], []
    for name, task, per_epoch in (
        ("mlp", _mlp(30 if full else 10, 16, 4, "0.2", *DECAY), 32),
        (
            "cnn",
            Task((*DIGITS, *SGD, "--batch", "16", "--lr", "0.2", "--epochs", "30" if full else "10", *DECAY), 4),
            22,
        ),
    ):
        methods: dict[str, Method] = {"dense": (Dense(), ())}
        methods |= {f"{rate}x": (ScaleCom(rate=rate, warmup_steps=per_epoch), ()) for rate in RATES}
        many = seeds if full else min(seeds, FEW)
        found = all_trained(book, f"accuracy-{name}", task, methods, many)
        epochs = len(found["dense"][0]["epochs"])
        claims += [
            compare(
                "Table 2",
                f"{name}: ScaleCom at {rate}x is as accurate as dense",
                _TABLE_2[rate],
                found,
                f"{rate}x",
                "dense",
                f"{_DATA[name]}, 4 ranks, SGD without momentum, learning rate falling to 0, {epochs} epochs of which 1 "
                f"dense, {many} seeds",
            )
            for rate in RATES
        ]
        drawn.append(_curves(book, f"accuracy-{name}", found))
    return claims, drawn


_TABLE_2 = {
    65: "Transformer-base at 65x: 27.24 BLEU, dense 27.64",
    100: "ResNet-50 at 96x: 75.99 %, dense 76.44 %; ResNet-34 on CIFAR-10 at 92x: 93.98 %, dense 93.78 %",
    400: "LSTM at 400x: 10.1 % word errors, dense 10.4 %",
}
_DATA = {"mlp": "MLP of 102 thousand, 2048 images of Fashion-MNIST", "cnn": "CNN of 21 thousand, handwritten digits"}


def _mlp(epochs: int, batch: int, ranks: int, lr: str, *options: str) -> Task:
    settings = (*FASHION, *SGD, "--batch", str(batch), "--lr", lr, "--epochs", str(epochs), *options)
    return Task(settings, ranks, train_samples=2048, test_samples=2000)


def large_batch(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Table 3, Figure 5: with a batch and a learning rate 8 times as large, beta 0.1 is as accurate as dense."""
    many = seeds if full else min(seeds, FEW)
    task = _mlp(40 if full else 12, 32, 8, "0.4", "--warmup-epochs", "2")
    methods: dict[str, Method] = {"dense": (Dense(), ())}
    methods |= {f"beta {beta:g}": (ScaleCom(rate=100, beta=beta, warmup_steps=16), ()) for beta in (1.0, 0.1)}
    found = all_trained(book, "large-batch", task, methods, many)
    differs = (
        f"{_DATA['mlp']}, 8 ranks of 32 images, learning rate 0.4 (8 x 0.05) reached after 2 epochs, which are dense, "
        f"100x, {many} seeds; at 0.8 dense training fails"
    )
    paper = "ResNet-50, 64 workers, batch 2048, 96x: 75.90 %, dense 76.47 %; beta = 1 is worse on large data"
    filtered = compare(
        "Table 3", "large batch, beta 0.1: as accurate as dense", paper, found, "beta 0.1", "dense", differs
    )
    plain = compare(
        "Fig. 5", "large batch, beta 1 (reported)", "curves below dense's", found, "beta 1", "dense", differs
    )
    ends = {name: [100 * record["accuracy"] for record in records] for name, records in found.items()}
    gain = paired(ends["beta 0.1"], ends["beta 1"])
    better = Claim(
        "Fig. 5",
        "large batch: the filter helps (beta 0.1 against beta 1)",
        "no difference on CIFAR-10, a gain on ImageNet, WMT14 and SWB300",
        f"difference {gain} points",
        None,
        "reported only; small data, as the paper's CIFAR-10",
    )
    return [filtered, _reported(plain), better], [_curves(book, "large-batch", found)]


def _reported(claim: Claim) -> Claim:
    return Claim(claim.where, claim.what, claim.paper, claim.ours, None, claim.differs)


def momentum(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """What the paper says no more of than that it is as in dense training: where momentum goes, and at which rate."""
    many = seeds if full else min(seeds, FEWER)
    method = ScaleCom(rate=100, warmup_steps=32)
    methods: dict[str, Method] = {
        "dense": (Dense(), ()),
        "after the mean": (method, ()),
        "before compression": (method, ("--synchronize", "updates")),
    }
    claims, drawn = [], []
    for lr, usual in MOMENTUM:
        epochs = 2 * usual if full else usual
        task = _mlp(epochs, 16, 4, f"{lr:g}", "--optimizer", "momentum")
        found = all_trained(book, f"momentum-{lr:g}", task, methods, many)
        differs = f"{_DATA['mlp']}, 4 ranks, momentum 0.9, learning rate {lr:g}, {epochs} epochs, 100x, {many} seeds"
        claims += [
            compare(
                "Sec. 4",
                f"momentum {name}, learning rate {lr:g}: as accurate as dense",
                "same settings as dense",
                found,
                name,
                "dense",
                differs,
            )
            for name in list(methods)[1:]
        ]
        drawn.append(_curves(book, f"momentum-{lr:g}", found))
    return claims, drawn
