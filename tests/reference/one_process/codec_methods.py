"""Methods with codecs with all their ranks in one process, from the definitions and the codecs in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import ECQSGD, DoubleSqueeze, LocalTopK, MemSGD, OneBitSGD, TernGrad, TopKSGD
from mpicomp.codecs import Codec, Draw
from mpicomp.codecs.top_k import TopK
from tests.reference.compressors import decoded, float32, norm
from tests.reference.one_process.allreduce import rounded
from tests.reference.one_process.base import Simulation, Vectors
from tests.reference.sparse import top


class OneProcess(Simulation):
    """All ranks' steps from the definitions, with the reference codecs."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.owners = np.zeros(self.n, self.compute)
        self.momenta = np.zeros((self.size, self.n), self.compute)

    def compute_step(self, g: Vectors) -> Vectors:
        return self.squeezed(g) if isinstance(self.options, DoubleSqueeze | MemSGD) else self.gathered(g)

    def state(self, rank: int) -> dict[str, Vectors]:
        if isinstance(self.options, DoubleSqueeze | MemSGD):
            return {"worker_error": self.residuals[rank]}
        if getattr(self.options, "momentum", 0):
            return {"residual": self.residuals[rank], "momentum": self.momenta[rank]}
        return {"residual": self.residuals[rank]} if isinstance(self.options, ECQSGD | OneBitSGD | LocalTopK) else {}

    def shares(self) -> dict[str, Vectors]:
        return {"owner_error": self.owners} if isinstance(self.options, DoubleSqueeze) else {}

    def draw(self, purpose: str, rank: int) -> Draw:
        return Draw(self.stream(purpose), self.t, rank, ranks=self.size)

    def mean(self, sent: list[Vectors]) -> Vectors:
        total = sent[0].copy()
        for vector in sent[1:]:
            total += vector
        return total / self.compute(self.size)

    def gathered(self, g: Vectors) -> Vectors:
        codec = codec_of(self.options, self.dtype)
        scales = self.shared_scales(g) if isinstance(self.options, TernGrad) else None
        sent = []
        for rank in range(self.size):
            draw, error = self.draw("code", rank), self.residuals[rank]
            if isinstance(self.options, ECQSGD):
                alpha, beta = (self.compute(number) for number in (self.options.alpha, self.options.beta))
                q = decoded(codec, error * alpha + g[rank], draw)
                self.residuals[rank] = error * beta + (g[rank] - q)
            elif isinstance(self.options, OneBitSGD | LocalTopK):
                momentum = getattr(self.options, "momentum", 0)
                u = self.momenta[rank] * self.compute(momentum) + g[rank] if momentum else g[rank]
                p = u + error
                q = decoded(codec, p, draw)
                self.residuals[rank] = p - q
                self.momenta[rank] = u
                if getattr(self.options, "masking", False):
                    self.momenta[rank][top(p, codec.elements, codec.keep)] = 0
            else:
                q = decoded(codec, g[rank], draw, scales)
            sent.append(q)
        return self.mean(sent)

    def shared_scales(self, g: Vectors) -> NDArray[np.float32]:
        """TernGrad's: the largest of the ranks', each at most `clip` times its root mean square."""
        bucket, clip = self.options.bucket, self.options.clip
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
        codec: Codec = self.options.compressor
        sent = []
        for rank in range(self.size):
            v = g[rank] + self.residuals[rank]
            q = decoded(codec, v, self.draw("code of worker", rank))
            self.residuals[rank] = v - q
            sent.append(q)
        mean = self.mean(sent)
        if isinstance(self.options, MemSGD):
            return mean
        v = mean + self.owners
        result = decoded(codec, v, self.draw("code of owner", 0))
        self.owners = v - rounded(result, self.dtype).astype(self.compute)  # what is applied
        return result


def codec_of(method: Any, dtype: Any = np.float32) -> Codec:
    """Of a method whose codes are gathered; of float64 vectors, float64 values are sent where values are."""
    if isinstance(method, TopKSGD | LocalTopK):
        return TopK(method.rate, method.chunk, dtype == np.float64)
    found: Codec = method.codec
    return found
