"""The training runs that try the ECQ-SGD paper again: methods, data and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from apps.records import Record
from apps.reproduce.ecq_sgd.linear_models import Problem, classification, regression, synthetic, train
from apps.studies.results import Results
from mpicomp import ECQSGD, QSGD, Dense, OneBitSGD, TernGrad
from mpicomp.algorithms import Algorithm

RANKS, BATCH = 4, 32
SYN = (256, 512, 1024)
SPARSE, WIDE = 5000, 1024
BETAS, ALPHAS = (0.9, 0.95, 0.98, 0.99, 1.0), (0.001, 0.003, 0.01, 0.03, 0.1, 0.15)
Found = Mapping[str, list[Record]]
"""The results of a study: for each method, a record of each seed."""
DATA = 3
"""This number is raised when `linear_models` changes, so that earlier results are not taken for later ones."""


@dataclass(frozen=True)
class Study:
    """Methods on one kind of problem, which the picklable ``make(seed=...)`` generates."""

    name: str
    make: Callable[..., Problem]
    methods: dict[str, Algorithm]
    lr: float
    most_seeds: int = 5


def studies() -> list[Study]:
    """All studies."""
    found = [
        Study(
            f"syn-{features}",
            partial(synthetic, features),
            {
                "dense": Dense(),
                "QSGD": QSGD(4, features, "l2"),
                "ECQ-SGD": ECQSGD(0.2, 0.9, 4, features, coding="fixed"),
            },
            0.02,
            most_seeds=100,
        )
        for features in SYN
    ]
    for name, make, features, levels, lr, alpha, beta in (
        ("regression", regression, 90, 4, 0.02, 0.2, 0.9),
        # with one level for 5000 elements the paper's 0.2 and 0.9 let the residual grow without bound
        ("classification", classification, SPARSE, 1, 0.2, 0.02, 1.0),
    ):
        methods: dict[str, Algorithm] = {
            "dense": Dense(),
            "1-bit SGD": OneBitSGD(features),
            "TernGrad": TernGrad(features),
            "QSGD": QSGD(levels, features, "l2", coding="entropy"),
            "ECQ-SGD": ECQSGD(alpha, beta, levels, features),
        }
        found.append(Study(name, make, methods, lr))
    cells = dict.fromkeys([*((0.01, beta) for beta in BETAS), *((alpha, 1.0) for alpha in ALPHAS)])
    grid: dict[str, Algorithm] = {"QSGD": QSGD(2, WIDE, "l2")}
    grid |= {cell(*at): ECQSGD(*at, 2, WIDE, coding="fixed") for at in cells}
    found.append(Study("grid", partial(synthetic, WIDE), grid, 0.01))
    return found


def cell(alpha: float, beta: float) -> str:
    """Name of a cell of Table 2."""
    return f"α {alpha:g}, β {beta:g}"


def one_seed(results: Results, study: Study, seed: int, steps: int) -> Record:
    """The results of all methods of a study with one seed."""
    problem = cache(study.make)

    def trained(method: Algorithm) -> Record:
        return train(problem(seed=seed), method, ranks=RANKS, steps=steps, lr=study.lr, batch=BATCH, seed=seed)

    found = {}
    for name, method in study.methods.items():
        settings = {"method": repr(method), "steps": steps, "lr": study.lr, "ranks": RANKS, "batch": BATCH}
        slug = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
        record = f"{study.name}-{slug}-{seed}"
        found[name] = results.get(record, {**settings, "data": DATA}, partial(trained, method))
    return found


def ends(records: Sequence[Record], what: str) -> list[float]:
    """The last value of each seed."""
    return [record[what][-1] for record in records]
