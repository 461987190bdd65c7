"""Table of methods by their command-line names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from collectives.quoting import suggestion
from mpicomp.aggregator.algorithm import Algorithm
from mpicomp.algorithms.cascading_ssdm import CascadingSSDM
from mpicomp.algorithms.dense import Dense
from mpicomp.algorithms.double_squeeze import DoubleSqueeze, MemSGD
from mpicomp.algorithms.ef_signsgd import EFSignSGD
from mpicomp.algorithms.majority_vote import MajorityVote
from mpicomp.algorithms.marsit import Marsit
from mpicomp.algorithms.one_bit_sgd import OneBitSGD
from mpicomp.algorithms.power_sgd import PowerSGD
from mpicomp.algorithms.qsgd import ECQSGD, QSGD
from mpicomp.algorithms.random_k import RandomK
from mpicomp.algorithms.scalecom import ScaleCom
from mpicomp.algorithms.sparse_loco import SparseLoCo
from mpicomp.algorithms.ssdm import SSDM
from mpicomp.algorithms.terngrad import TernGrad
from mpicomp.algorithms.top_k_sgd import LocalTopK, TopKSGD
from mpicomp.algorithms.true_top_k import TrueTopK

ALGORITHMS: dict[str, type[Algorithm]] = {
    "dense": Dense,
    "marsit": Marsit,
    "cascading-ssdm": CascadingSSDM,
    "majority-vote": MajorityVote,
    "ef-signsgd": EFSignSGD,
    "ssdm": SSDM,
    "qsgd": QSGD,
    "ecq-sgd": ECQSGD,
    "terngrad": TernGrad,
    "one-bit-sgd": OneBitSGD,
    "double-squeeze": DoubleSqueeze,
    "mem-sgd": MemSGD,
    "power-sgd": PowerSGD,
    "local-top-k": LocalTopK,
    "top-k-sgd": TopKSGD,
    "scalecom": ScaleCom,
    "random-k": RandomK,
    "true-top-k": TrueTopK,
    "sparse-loco": SparseLoCo,
}
"""Class of the options of each method, by its name on command lines. `Auto` chooses between two, and has no entry."""


def method(name: str, **options: Any) -> Algorithm:
    """Return one of `ALGORITHMS` by its command-line name; raises the errors of `mpicomp.algorithm`."""
    require_name(name, ALGORITHMS)
    return ALGORITHMS[name](**options)


def require_name(name: str, names: Collection[str]) -> None:
    """Raise ValueError unless `name` is one of `names`."""
    if name not in names:
        raise ValueError(f"there is no algorithm {name!r}{suggestion(name, names)}: choose one of {', '.join(names)}")
