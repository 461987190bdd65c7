"""The methods that the DoubleSqueeze paper compares, with a parameter server and without."""

from __future__ import annotations

from mpicomp import QSGD, Dense, DoubleSqueeze, MemSGD, TopKSGD
from mpicomp.algorithms import Algorithm
from mpicomp.codecs import OneBit, Quantizer, TopK
from mpicomp.codecs.base import Codec
from mpicomp.codecs.full_precision import FullPrecision

RANKS = 4
RATE, BLOCK = 100, 6400
BUCKET = 4096
"""Elements that share a scale where times and bytes are measured: short, so that shards of a small model are even."""
WHOLE = 1 << 16
"""The bucket in training: longer than the model, so that there is one scale, as in the paper."""

TOPOLOGIES = {"star": "parameter server", "ring": "all-to-all"}
"""The topologies, and what the paper calls them."""

DENSE, QUANTIZED, SPARSE = "dense", "QSGD", "Top-k SGD"
DS_1BIT, MEM_1BIT = "DoubleSqueeze, 1-bit", "MEM-SGD, 1-bit"
DS_TOPK, MEM_TOPK = "DoubleSqueeze, top-k", "MEM-SGD, top-k"
FAMILIES = {"1-bit": (DS_1BIT, MEM_1BIT, QUANTIZED), "top-k": (DS_TOPK, MEM_TOPK, SPARSE)}
"""DoubleSqueeze, and with the same codes MEM-SGD and a method without error feedback."""
GROUPS = {group: (DENSE, *names) for group, names in FAMILIES.items()}
RIVALS = {ours: (DENSE, *others) for ours, *others in FAMILIES.values()}
METHODS = (DENSE, *FAMILIES["1-bit"], *FAMILIES["top-k"])


def methods(bucket: int = BUCKET) -> dict[str, Algorithm]:
    """The seven methods by name, with so many elements that share a scale.

    Over a star all go through its root. Over other topologies dense goes round a ring, DoubleSqueeze and MEM-SGD have
    an owner for each part of the vector, and all ranks gather the codes of QSGD and top-k SGD.
    """
    one_bit, top_k = OneBit(bucket), TopK(RATE, BLOCK)
    return {
        DENSE: Dense(),
        DS_1BIT: DoubleSqueeze(one_bit),
        MEM_1BIT: MemSGD(one_bit),
        QUANTIZED: QSGD(1, bucket, "linf"),
        DS_TOPK: DoubleSqueeze(top_k),
        MEM_TOPK: MemSGD(top_k),
        SPARSE: TopKSGD(RATE, BLOCK),
    }


def formula_bytes(name: str, topology: str, n: int, ranks: int) -> int:
    """Bytes that all ranks together send for a vector, by the sizes of the codecs.

    Codes go from every rank but the owner of a part to the owner, and the result goes back: ``(M - 1) (first +
    second)``. Codes that are gathered go from every rank to all others: ``M (M - 1) first``. The formula leaves out the
    words by which ranks report NaN, and the padding of messages that carry a part of the vector.
    """
    one_bit, top_k, full = OneBit(BUCKET), TopK(RATE, BLOCK), FullPrecision("float32")
    passes: dict[str, tuple[Codec, Codec]] = {
        DENSE: (full, full),
        DS_1BIT: (one_bit, one_bit),
        MEM_1BIT: (one_bit, full),
        QUANTIZED: (Quantizer(BUCKET, 1, "linf"), full),
        DS_TOPK: (top_k, top_k),
        MEM_TOPK: (top_k, full),
        SPARSE: (top_k, full),
    }
    first, second = (codec.nbytes(n) for codec in passes[name])
    gathered = topology != "star" and name in (QUANTIZED, SPARSE)
    return ranks * (ranks - 1) * first if gathered else (ranks - 1) * (first + second)
