"""Two of the GPU's kernels as numba.cuda compiles them, for `apps.performance.gpu_kernels` to compare compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

THREADS = 256
WARP = 32  # threads that vote together: half a word


@cuda.jit
def pack(x, halves, odd_positive, zero, tiny, strange):  # type: ignore[no-untyped-def]
    """Signs of x as bits, zeros alternating; `strange` becomes 1 where x is not finite."""
    # x: float32[n]; halves: int32[2 ceil(n / 64)], overwritten; zero and tiny: 0 and the smallest positive number;
    # strange: int32[1]
    i = cuda.grid(1)
    positive = False
    if i < x.size:
        v = x[i]
        positive = v >= (zero if (i % 2 == 1) == odd_positive else tiny)
        if v - v != zero:
            strange[0] = 1
    vote = cuda.ballot_sync(0xFFFFFFFF, positive)
    if cuda.laneid == 0 and i // WARP < halves.size:
        halves[i // WARP] = vote


@cuda.jit
def merge(words, incoming, held):  # type: ignore[no-untyped-def]
    """held = (incoming AND words) OR (held AND NOT words); all int64[k], held is overwritten."""
    j = cuda.grid(1)
    if j < held.size:
        held[j] ^= (held[j] ^ incoming[j]) & words[j]


def numba_calls(x: Any, words: Any, incoming: Any, held: Any) -> dict[str, Callable[[], object]]:
    """Calls of both kernels. x : float32[n]; the others int64[k]; tensors of the GPU."""
    import torch

    halves = torch.zeros(2 * -(-x.numel() // 64), dtype=torch.int32, device=x.device)
    strange = torch.zeros(1, dtype=torch.int32, device=x.device)
    given = [cuda.as_cuda_array(tensor) for tensor in (x, halves, strange, words, incoming, held)]
    zero = np.float32(0)
    tiny = np.nextafter(zero, np.float32(1))

    def blocks(threads: int) -> int:
        return -(-threads // THREADS)

    return {
        "pack, numba.cuda": lambda: pack[blocks(WARP * halves.numel()), THREADS](
            *given[:2], True, zero, tiny, given[2]
        ),
        "merge alone, numba.cuda": lambda: merge[blocks(held.numel()), THREADS](*given[3:]),
    }
