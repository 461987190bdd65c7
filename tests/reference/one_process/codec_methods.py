"""Methods with codecs with all their ranks in one process, from the definitions and the codecs in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import ECQSGD, DoubleSqueeze, LocalTopK, MemSGD, OneBitSGD, TernGrad, TopKSGD
from mpicomp.codecs import Codec, Draw
from mpicomp.codecs.top_k import TopK
from mpicomp.kernels.streams import Stream
from tests.reference.compressors import decoded, float32, norm
from tests.reference.one_process.allreduce import rounded

Vectors = NDArray[Any]


class OneProcess:
    """All ranks' steps from the definitions, with the reference codecs.

    Parameters
    ----------
    method : Algorithm
    size, n : int
    dtype : type or "bfloat16"
    vector_id : int
    """

    def __init__(self, method: Any, size: int, n: int, dtype: Any, vector_id: int = 0) -> None:
        self.method, self.size, self.n, self.dtype, self.t = method, size, n, dtype, 0
        self.vector_id = vector_id
        self.compute = np.float64 if dtype == np.float64 else np.float32
        self.errors = np.zeros((size, n), self.compute)
        self.owners = np.zeros(n, self.compute)

    def step(self, gradients: Vectors) -> Vectors:
        """Row m is rank m's vector; returns what every rank gets."""
        g = gradients.astype(self.compute)
        two_passes = isinstance(self.method, DoubleSqueeze | MemSGD)
        result = self.squeezed(g) if two_passes else self.gathered(g)
        self.t += 1
        return rounded(result, self.dtype)

    def state(self, rank: int) -> dict[str, Vectors]:
        """Return what one rank keeps, by the names of `state_dict`."""
        if isinstance(self.method, DoubleSqueeze | MemSGD):
            return {"worker_error": self.errors[rank]}
        return {"residual": self.errors[rank]} if isinstance(self.method, ECQSGD | OneBitSGD | LocalTopK) else {}

    def shares(self) -> dict[str, Vectors]:
        """Return what the ranks keep together, each a part: by the names of `state_dict`, all parts."""
        return {"owner_error": self.owners} if isinstance(self.method, DoubleSqueeze) else {}

    def draw(self, purpose: str, rank: int) -> Draw:
        return Draw(Stream(getattr(self.method, "seed", 0), self.vector_id, purpose), self.t, rank)

    def mean(self, sent: list[Vectors]) -> Vectors:
        total = sent[0].copy()
        for vector in sent[1:]:
            total += vector
        return total / self.compute(self.size)

    def gathered(self, g: Vectors) -> Vectors:
        codec = codec_of(self.method, self.dtype)
        scales = self.shared_scales(g) if isinstance(self.method, TernGrad) else None
        sent = []
        for rank in range(self.size):
            draw, error = self.draw("code", rank), self.errors[rank]
            if isinstance(self.method, ECQSGD):
                alpha, beta = (self.compute(number) for number in (self.method.alpha, self.method.beta))
                q = decoded(codec, error * alpha + g[rank], draw)
                self.errors[rank] = error * beta + (g[rank] - q)
            elif isinstance(self.method, OneBitSGD | LocalTopK):
                p = g[rank] + error
                q = decoded(codec, p, draw)
                self.errors[rank] = p - q
            else:
                q = decoded(codec, g[rank], draw, scales)
            sent.append(q)
        return self.mean(sent)

    def shared_scales(self, g: Vectors) -> NDArray[np.float32]:
        """TernGrad's: the largest of the ranks', each at most `clip` times its root mean square."""
        bucket, clip = self.method.bucket, self.method.clip
        found = [np.float32(0)] * -(-self.n // bucket)
        for row in g:
            for number in range(len(found)):
                part = row[number * bucket : (number + 1) * bucket]
                scale = norm(part, "linf")
                if clip is not None:
                    scale = min(scale, clip * (norm(part, "l2") / np.sqrt(part.size)))
                found[number] = max(found[number], float32(scale))
        return np.array(found, np.float32)

    def squeezed(self, g: Vectors) -> Vectors:
        codec: Codec = self.method.compressor
        sent = []
        for rank in range(self.size):
            v = g[rank] + self.errors[rank]
            q = decoded(codec, v, self.draw("code of worker", rank))
            self.errors[rank] = v - q
            sent.append(q)
        mean = self.mean(sent)
        if isinstance(self.method, MemSGD):
            return mean
        v = mean + self.owners
        result = decoded(codec, v, self.draw("code of owner", 0))
        self.owners = v - rounded(result, self.dtype).astype(self.compute)  # what is applied
        return result


def codec_of(method: Any, dtype: Any = np.float32) -> Codec:
    """Of a method whose codes are gathered; of float64 vectors, float64 values are sent where values are."""
    if isinstance(method, TopKSGD):
        return TopK(method.rate, method.chunk, dtype == np.float64)
    found: Codec = method.codec
    return found


def gradients(size: int, n: int, dtype: Any, step: int) -> Vectors:
    """Different on every rank, some of it zero, its size changing along the vector."""
    rng = np.random.default_rng((size, n, step))
    made = rng.standard_normal((size, n)) * np.linspace(0.1, 3, max(n, 1))[:n]
    made[:, ::17] = 0
    return made.astype(dtype)


def owned(aggregator: Any) -> Vectors:
    """The owner errors of all ranks in one vector."""
    total = np.zeros_like(aggregator.feedback.owner.residual)
    aggregator.comm.mpi_comm.Allreduce(aggregator.feedback.owner.residual, total)
    return total
