"""What the DoubleSqueeze paper compares, in its form with a parameter server and in the one without."""

from __future__ import annotations

from collections.abc import Sequence

from mpicomp import QSGD, Dense, DoubleSqueeze, MemSGD, TopKSGD
from mpicomp.algorithms import Algorithm
from mpicomp.codecs import OneBit, Quantizer, TopK
from mpicomp.codecs.base import Codec
from mpicomp.codecs.full_precision import FullPrecision

RANKS = 4
RATE, CHUNK = 100, 6400
BUCKET = 4096
"""Elements that share a scale where times and bytes are measured: short, so that shards of a small model are even."""
WHOLE = 1 << 16
"""Of the bucket in training: longer than the model, so that there is one scale, as in the paper."""

FORMS = {"star": "parameter server", "ring": "all-to-all"}
"""Topologies, and what they are called."""

DENSE, QUANTIZED, SPARSE = "dense", "QSGD", "Top-k SGD"
DS_1BIT, MEM_1BIT = "DoubleSqueeze, 1-bit", "MEM-SGD, 1-bit"
DS_TOPK, MEM_TOPK = "DoubleSqueeze, top-k", "MEM-SGD, top-k"
GROUPS = {"1-bit": (DENSE, DS_1BIT, MEM_1BIT, QUANTIZED), "top-k": (DENSE, DS_TOPK, MEM_TOPK, SPARSE)}
METHODS = (DENSE, DS_1BIT, MEM_1BIT, QUANTIZED, DS_TOPK, MEM_TOPK, SPARSE)


def methods(bucket: int = BUCKET) -> dict[str, Algorithm]:
    """The seven by name.

    Which form they have is the topology's: with a server all go over it; otherwise dense goes round a ring,
    DoubleSqueeze and MEM-SGD have owners of a part each, and QSGD's and top-k SGD's codes are gathered by all.

    Parameters
    ----------
    bucket : int
        Elements that share a scale.
    """
    one_bit, top_k = OneBit(bucket), TopK(RATE, CHUNK)
    return {
        DENSE: Dense(),
        DS_1BIT: DoubleSqueeze(one_bit),
        MEM_1BIT: MemSGD(one_bit),
        QUANTIZED: QSGD(1, bucket, "linf"),
        DS_TOPK: DoubleSqueeze(top_k),
        MEM_TOPK: MemSGD(top_k),
        SPARSE: TopKSGD(RATE, CHUNK),
    }


def codecs(name: str, bucket: int = BUCKET) -> tuple[Codec, Codec]:
    """Of the first pass and, where there is one, of the second."""
    one_bit, top_k, as_it_is = OneBit(bucket), TopK(RATE, CHUNK), FullPrecision("float32")
    known: dict[str, tuple[Codec, Codec]] = {
        DENSE: (as_it_is, as_it_is),
        DS_1BIT: (one_bit, one_bit),
        MEM_1BIT: (one_bit, as_it_is),
        QUANTIZED: (Quantizer(bucket, 1, "linf"), as_it_is),
        DS_TOPK: (top_k, top_k),
        MEM_TOPK: (top_k, as_it_is),
        SPARSE: (top_k, as_it_is),
    }
    return known[name]


def gathered(name: str, form: str) -> bool:
    """Whether every rank gets every other's codes."""
    return form != "star" and name in (QUANTIZED, SPARSE)


def bytes_of_all(name: str, form: str, pieces: Sequence[int], ranks: int, bucket: int = BUCKET) -> int:
    """What all ranks together send at a step, by the codecs' own sizes.

    A piece goes from every rank but its owner to the owner, and its result back: ``(M - 1) (first + second)``, whoever
    owns what. Gathered codes go from every rank to all others: ``M (M - 1) first``. What ranks tell each other of NaN
    is not in it.

    Parameters
    ----------
    name : str
        Of the method.
    form : str
        Key of `FORMS`.
    pieces : sequence of int
        Elements that each message carries.
    ranks : int
    bucket : int
        Elements that share a scale.
    """
    first, second = codecs(name, bucket)
    out = sum(first.nbytes(length) for length in pieces)
    if gathered(name, form):
        return ranks * (ranks - 1) * out
    back = sum(second.nbytes(length) for length in pieces)
    return (ranks - 1) * (out + back)
