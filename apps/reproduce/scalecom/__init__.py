"""ScaleCom (Chen et al., NeurIPS 2020, arXiv 2104.11125): accuracy at high rates, and its assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.networks import Task, per_epoch, trained
from apps.reproduce.scalecom.bytes_sent import guidance, volume
from apps.reproduce.scalecom.leaders import leaders
from apps.reproduce.scalecom.memories import similarity
from apps.studies.parallel import Run, run_seeds
from apps.studies.results import Results
from mpicomp import Dense, ScaleCom
from mpicomp.algorithms import Algorithm

MARGIN = 0.01  # of accuracy: less than that is no significant loss; the paper's largest is 0.58 points
FEW = 8  # seeds of short runs
RATES = (65, 100, 400)
MOMENTUM = ((0.003, 40), (0.01, 40), (0.03, 10))
"""Learning rates, which momentum multiplies by 10 in the long run, and epochs."""
MASKED_LR = 0.01  # at which momentum within the method is tried with all rates
FEWER = 4  # seeds of the runs with momentum
SGD = ("--optimizer", "sgd")
DECAY = ("--decay", "cosine")  # as the paper's rates fall, too; at a constant one the last epoch's accuracy scatters
FASHION = ("--dataset", "fashion-mnist", "--model", "mlp")
DIGITS = ("--dataset", "digits", "--model", "cnn", "--width", "32")
Method = tuple[Algorithm, tuple[str, ...]]
"""A method, and the options of ``apps.train`` that only this method has."""


def all_trained(
    results: Results, name: str, task: Task, methods: Mapping[str, Method], seeds: int
) -> dict[str, list[Record]]:
    """The runs of each method, by seed."""

    def make(key: str, seed: int) -> Run:
        method, own = methods[key]
        return partial(trained, results, f"{name}-{key.replace(' ', '-')}", task, method, seed, own)

    return run_seeds(methods, seeds, make)


def compare(found: Mapping[str, list[Record]], ours: str, where: str, what: str, paper: str, differs: str) -> Claim:
    """Check whether `ours` is as accurate as dense, that is, surely less than `MARGIN` below it."""
    a, b = ([100 * record["accuracy"] for record in found[name]] for name in (ours, "dense"))
    difference = paired(a, b)
    holds = difference.least > -100 * MARGIN
    text = f"{np.mean(a):.2f} % (dense {np.mean(b):.2f} %); difference {difference} points"
    return Claim(where, what, paper, text, holds, f"{differs}; “as accurate”: surely less than a point below")


def _curves(results: Results, name: str, found: Mapping[str, list[Record]]) -> Path:
    """Draw test accuracy against epochs, without the runs that diverged."""
    lines = []
    for method, records in found.items():
        whole = per_epoch([record for record in records if not record["diverged"]], "accuracy")
        if whole:
            lines.append(Curve(method, range(1, len(whole[0]) + 1), whole))
    return curves(results.folder / f"{name}.png", lines, "epoch", "test accuracy")


def accuracy(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Table 2, Figure 4: ScaleCom at 65 to 400 times, with the settings that were tuned for dense."""
    claims, drawn = [], []
    epochs = 30 if full else 10
    cnn = Task((*DIGITS, *SGD, "--batch", "16", "--lr", "0.2", "--epochs", str(epochs), *DECAY), 4)
    for name, task, warmup_steps in (("mlp", _mlp(epochs, 16, 4, "0.2", *DECAY), 32), ("cnn", cnn, 22)):
        methods: dict[str, Method] = {"dense": (Dense(), ())}
        methods |= {f"{rate}x": (ScaleCom(rate=rate, warmup_steps=warmup_steps), ()) for rate in RATES}
        many = seeds if full else min(seeds, FEW)
        found = all_trained(results, f"accuracy-{name}", task, methods, many)
        differs = (
            f"{_DATA[name]}, 4 ranks, SGD without momentum, learning rate falling to 0, "
            f"{len(found['dense'][0]['epochs'])} epochs of which 1 dense, {many} seeds"
        )
        for rate in RATES:
            what = f"{name}: ScaleCom at {rate}x is as accurate as dense"
            claims.append(compare(found, f"{rate}x", "Table 2", what, _TABLE_2[rate], differs))
        drawn.append(_curves(results, f"accuracy-{name}", found))
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


def large_batch(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Table 3, Figure 5: a batch and a learning rate 8 times as large, with beta 1 and 0.1."""
    many = seeds if full else min(seeds, FEW)
    task = _mlp(40 if full else 12, 32, 8, "0.4", "--warmup-epochs", "2")
    methods: dict[str, Method] = {"dense": (Dense(), ())}
    methods |= {f"beta {beta:g}": (ScaleCom(rate=100, beta=beta, warmup_steps=16), ()) for beta in (1.0, 0.1)}
    found = all_trained(results, "large-batch", task, methods, many)
    differs = (
        f"{_DATA['mlp']}, 8 ranks of 32 images, learning rate 0.4 (8 x 0.05) reached after 2 epochs, which are dense, "
        f"100x, {many} seeds; at 0.8 dense training fails"
    )
    paper = "ResNet-50, 64 workers, batch 2048, 96x: 75.90 %, dense 76.47 %; beta = 1 is worse on large data"
    what = "large batch, beta 0.1: as accurate as dense"
    filtered = compare(found, "beta 0.1", "Table 3", what, paper, differs)
    plain = compare(found, "beta 1", "Fig. 5", "large batch, beta 1 (reported)", "curves below dense's", differs)
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
    return [filtered, replace(plain, holds=None), better], [_curves(results, "large-batch", found)]


def momentum(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Section 4: momentum after the mean or before compression, at several learning rates, as in dense training."""
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
        found = all_trained(results, f"momentum-{lr:g}", task, methods, many)
        differs = f"{_DATA['mlp']}, 4 ranks, momentum 0.9, learning rate {lr:g}, {epochs} epochs, 100x, {many} seeds"
        for name in list(methods)[1:]:
            what = f"momentum {name}, learning rate {lr:g}: as accurate as dense"
            claims.append(compare(found, name, "Sec. 4", what, "same settings as dense", differs))
        drawn.append(_curves(results, f"momentum-{lr:g}", found))
    return claims, drawn


def masking(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Momentum within the method, also cleared where elements were sent, as in Deep Gradient Compression; ours."""
    many = seeds if full else min(seeds, FEWER)
    claims, drawn = [], []
    for lr, usual in MOMENTUM:
        epochs = 2 * usual if full else usual
        task = _mlp(epochs, 16, 4, f"{lr:g}", "--optimizer", "momentum")
        methods: dict[str, Method] = {"dense": (Dense(), ())}
        for rate in RATES if lr == MASKED_LR else (100,):
            for name, masked in (("kept", False), ("masked", True)):
                methods[f"{name} {rate}x"] = (ScaleCom(rate=rate, momentum=0.9, masking=masked), SGD)
        found = all_trained(results, f"momentum-{lr:g}", task, methods, many)
        differs = f"{_DATA['mlp']}, 4 ranks, learning rate {lr:g}, {epochs} epochs, {many} seeds"
        for name in list(methods)[1:]:
            what = f"momentum 0.9 within ScaleCom, {name}, learning rate {lr:g}: as accurate as dense"
            paper = "masking is of Lin et al., ICLR 2018" if "masked" in name else "–"
            claim = compare(found, name, "ours", what, paper, differs)
            claims.append(claim if name == "masked 100x" else replace(claim, holds=None))
        drawn.append(_curves(results, f"masking-{lr:g}", found))
    return claims, drawn


PARTS = (accuracy, volume, similarity, leaders, large_batch, momentum, masking, guidance)
