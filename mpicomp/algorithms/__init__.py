"""Methods: one file each, a frozen dataclass of options that names its parts."""

from __future__ import annotations

from typing import Any

from mpicomp.aggregator.algorithm import Algorithm
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms.auto import Auto
from mpicomp.algorithms.dense import Dense
from mpicomp.algorithms.double_squeeze import DoubleSqueeze
from mpicomp.algorithms.ef_signsgd import EFSignSGD
from mpicomp.algorithms.local_top_k import LocalTopK
from mpicomp.algorithms.marsit import Marsit
from mpicomp.algorithms.per_node import PerNode
from mpicomp.algorithms.power_sgd import PowerSGD
from mpicomp.algorithms.qsgd import ECQSGD, QSGD
from mpicomp.algorithms.registry import ALGORITHMS, list_methods, method, require_name
from mpicomp.algorithms.relay import Relay
from mpicomp.algorithms.scalecom import ScaleCom
from mpicomp.algorithms.sparse_loco import SparseLoCo
from mpicomp.contrib.cascading_ssdm import CascadingSSDM
from mpicomp.contrib.ef21 import EF21
from mpicomp.contrib.majority_vote import MajorityVote
from mpicomp.contrib.mem_sgd import MemSGD
from mpicomp.contrib.one_bit_sgd import OneBitSGD
from mpicomp.contrib.random_k import RandomK
from mpicomp.contrib.ssdm import SSDM
from mpicomp.contrib.terngrad import TernGrad
from mpicomp.contrib.top_k_sgd import TopKSGD
from mpicomp.contrib.true_top_k import TrueTopK

list_methods()  # here, where other packages can import ours
NAMES = (*ALGORITHMS, "auto")
"""Names of methods on command lines. "auto" chooses between two methods, see `Auto`."""


def algorithm(name: str, **options: Any) -> Algorithm:
    """Return a method by its name on command lines.

    Parameters
    ----------
    name : str
        One of `ALGORITHMS`, or ``"auto"``.
    **options
        Options of its class; the others have their defaults.

    Returns
    -------
    Algorithm

    Raises
    ------
    ValueError
        There is no such method, or an option is out of range.
    TypeError
        There is no such option.

    Examples
    --------
    >>> from mpicomp.algorithms import ALGORITHMS, NAMES, algorithm
    >>> algorithm("qsgd", levels=7)
    QSGD(levels=7, bucket=512, norm='linf', seed=0, coding='fixed', correlated=False)
    >>> algorithm("marsitt")
    Traceback (most recent call last):
        ...
    ValueError: there is no algorithm 'marsitt' (did you mean 'marsit'?): choose one of dense, ...
    >>> sorted(name for name in ALGORITHMS if algorithm(name).synchronize == "updates")
    ['marsit', 'relay', 'sparse-loco']
    >>> set(NAMES) - set(ALGORITHMS)
    {'auto'}
    """
    require_name(name, NAMES)
    return Auto(**options) if name == "auto" else method(name, **options)


__all__ = [
    "ALGORITHMS", "ECQSGD", "EF21", "NAMES", "QSGD", "SSDM", "Aggregator", "Algorithm", "Auto", "CascadingSSDM",
    "Dense", "DoubleSqueeze", "EFSignSGD", "LocalTopK", "MajorityVote", "Marsit", "MemSGD", "OneBitSGD", "PerNode",
    "PowerSGD", "RandomK", "Relay", "ScaleCom", "SparseLoCo", "TernGrad", "TopKSGD", "TrueTopK", "algorithm",
]  # fmt: skip
