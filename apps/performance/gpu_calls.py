"""The calls of the GPU's kernels that `apps.performance.gpu_kernels` times, and the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from mpicomp.kernels.cpu.bucketed import LINF
from mpicomp.kernels.streams import GROUP, Stream, bernoulli_table, source

COPY = "copy"
BUCKET, LEVELS = 512, 7  # of the quantizer
RANKS = 4  # whose codes are averaged
CHUNK, LONG_CHUNK, RATE = 100, 1_000_000, 100  # of top-k
Calls = dict[str, tuple[Callable[[], object], int]]


def calls(n: int, device: str) -> Calls:
    """All kernels that are timed, on vectors of `n` elements."""
    import torch

    random = torch.Generator(device).manual_seed(1)
    x = torch.randn(n, generator=random, device=device)
    residual, out = torch.zeros_like(x), torch.empty_like(x)
    return {
        COPY: (lambda: out.copy_(x), 8 * n),
        **sign_calls(x, residual, out),
        **merge_calls(n, random),
        **quantizer_calls(x),
        **levels_calls(x, residual),
        **top_k_calls(x, residual),
    }


def sign_calls(x: Any, residual: Any, out: Any) -> Calls:
    """Signs to bits and back, without and with a residual."""
    import torch

    from apps.performance.gpu_blocks import scale_rows, whole_blocks
    from mpicomp.kernels.gpu import sign, sign_blocks

    n, device = x.numel(), x.device
    bits = torch.zeros(-(-n // 64), dtype=torch.int64, device=device)
    zero, one = np.float32(0), np.float32(1)
    tiny = np.nextafter(zero, one)
    blocks = whole_blocks(n, device)
    reports = torch.zeros((blocks.n_blocks, 2), dtype=torch.int64, device=device)
    scales = scale_rows(x, one, one, one)
    values, positions = np.array([1.5, -1.5], np.float32).view(np.uint32), out.view(torch.int32)
    return {
        "pack": (lambda: sign.pack(x, bits, True, zero, tiny), 4 * n + n // 8),
        "unpack": (lambda: sign.unpack(bits, values[0], values[1], False, positions), 4 * n + n // 8),
        'residual "own" + pack': (
            lambda: sign_blocks.encode_blocks(x, residual, residual, bits, blocks, scales, False, True, reports),
            12 * n + n // 8,
        ),
        'residual "paper" + pack': (
            lambda: sign_blocks.encode_blocks(x, residual, residual, bits, blocks, scales, True, True, reports),
            12 * n + n // 4,
        ),
    }  # fmt: skip


def words(n: int, random: Any) -> Any:
    """Random words of `n` bits."""
    import torch

    return torch.randint(-(2**63), 2**63 - 1, (8 * -(-n // GROUP),), generator=random, device=random.device)


def merge_calls(n: int, random: Any) -> Calls:
    """Bits of two ranks merged at random: with the drawing of the words that choose, and without."""
    from mpicomp.kernels.gpu import philox

    drawn, incoming, held = words(n, random), words(n, random), words(n, random)
    schedule, step, rank = Stream(0, 0, "merge").schedule(), np.uint64(1), source(0)
    nbytes = incoming.numel() * 8

    def merge(incoming_weight: int, held_weight: int) -> None:
        table, rest = bernoulli_table(incoming_weight, held_weight)
        philox.draw_words(schedule, np.uint64(0), step, rank, table, rest, None, drawn)
        philox.merge_words(drawn, incoming, held)

    return {
        "draw + merge, p = 1/2": (lambda: merge(1, 1), 3 * nbytes),
        "draw + merge, p = 2/3": (lambda: merge(2, 1), 3 * nbytes),
        "merge alone": (lambda: philox.merge_words(drawn, incoming, held), 4 * nbytes),
    }


def quantizer_calls(x: Any) -> Calls:
    """Stochastic quantization, and back."""
    import torch

    from mpicomp.kernels.gpu import quantizer

    n, bits = x.numel(), LEVELS.bit_length() + 1
    scales = torch.full((-(-n // BUCKET),), 4.0, device=x.device)
    codes, out = torch.empty(n, dtype=torch.uint8, device=x.device), torch.empty_like(x)
    planes = torch.empty((bits, -(-n // 64)), dtype=torch.int64, device=x.device)
    all_planes, all_scales = planes.new_zeros((RANKS, *planes.shape)), scales.repeat(RANKS, 1)
    schedule, step, rank = Stream(0, 0, "quantize").schedule(), np.uint64(1), source(0)
    drawn, by = (schedule, np.uint64(0), step, rank), (LEVELS, 1 << (bits - 1))
    whole, packed = 5 * n + 4 * scales.numel(), 4 * n + bits * n // 8 + 4 * scales.numel()
    return {
        "quantize": (lambda: quantizer.quantize(*drawn, x, BUCKET, scales, *by, None, codes), whole),
        "dequantize": (lambda: quantizer.dequantize(codes, BUCKET, scales, *by, out, False), whole),
        "norms + quantize + pack": (
            lambda: quantizer.encode(*drawn, x, BUCKET, LINF, scales, *by, None, None, planes), packed + 4 * n,
        ),
        "unpack + dequantize": (lambda: quantizer.decode(planes, BUCKET, scales, *by, None, out, False), packed),
        f"unpack + dequantize + average {RANKS} ranks": (
            lambda: quantizer.mean(all_planes, BUCKET, all_scales, *by, out), RANKS * (packed - 4 * n) + 4 * n,
        ),
    }  # fmt: skip


def levels_calls(x: Any, residual: Any) -> Calls:
    """A hop of Relay, which adds a code to the vector and its residual and encodes the sum, and decoding."""
    import torch

    from mpicomp.codecs import Levels

    n, left, made = x.numel(), torch.empty_like(x), Calls()
    for levels in (3, 4, 16, 256):
        codec = Levels(levels)
        buckets = codec.buckets(n).on(lambda table: torch.from_numpy(table).to(x.device))
        codes, incoming = torch.zeros((2, -(-codec.nbytes(n) // 8) * 8), dtype=torch.uint8, device=x.device)
        codes, incoming = codes[: codec.nbytes(n)], incoming[: codec.nbytes(n)]
        codec.relay(buckets, left, incoming, (x, None))
        hop: Any = partial(codec.relay, buckets, left, codes, (x, residual), incoming)
        made[f"hop, {levels} levels"] = hop, 12 * n + 2 * codec.nbytes(n)
        spread: Any = partial(codec.spread, buckets, codes, RANKS, 0, left)
        made[f"decode {levels} levels"] = spread, 4 * n + codec.nbytes(n)
    return made


def top_k_calls(x: Any, residual: Any) -> Calls:
    """The largest hundredth of x + residual, in chunks of different lengths."""
    import torch

    from mpicomp.kernels.gpu import top_k

    n, mask, high = x.numel(), np.uint32(0x7FFFFFFF), np.uint64(1 << 30)
    room = n // RATE + -(-n // CHUNK) + -(-n // LONG_CHUNK)
    indices, values = torch.empty(room, dtype=torch.int32, device=x.device), torch.empty(room, device=x.device)

    def several(chunk: int) -> object:
        work = None, None, None
        return top_k.several(x, residual, None, chunk, chunk // RATE, 16, mask, high, *work, indices, values)

    nbytes = 8 * n + 8 * (n // RATE)
    kept, bits = -(-n // CHUNK), (CHUNK - 1).bit_length()
    left, sent = torch.empty_like(x), values.new_zeros((RANKS, kept))
    planes = torch.zeros((RANKS, bits, -(-kept // 64)), dtype=torch.int64, device=x.device)
    payload = 4 * kept + bits * kept // 8
    return {
        f"select and pack 1 of {CHUNK}": (
            lambda: top_k.encode(x, residual, left, CHUNK, sent[0], planes[0]), 12 * n + payload,
        ),
        f"average {RANKS} ranks' 1 of {CHUNK}": (
            lambda: top_k.mean(sent, planes, CHUNK, 1, left), 4 * n + RANKS * payload,
        ),
        f"top 1 of {CHUNK}": (lambda: top_k.largest(x, residual, None, CHUNK, mask, indices, values), nbytes),
        f"top 10 of {10 * CHUNK}": (lambda: several(10 * CHUNK), nbytes),
        f"top {LONG_CHUNK // RATE} of {LONG_CHUNK}": (lambda: several(LONG_CHUNK), nbytes),
    }  # fmt: skip


def calls_by_numba(n: int, nbytes: Mapping[str, int]) -> Calls:
    """The same work as of the calls whose names these begin with."""
    import torch

    from apps.performance.gpu_numba import numba_calls

    random = torch.Generator("cuda").manual_seed(1)
    x, bits = torch.randn(n, generator=random, device="cuda"), [words(n, random) for _ in range(3)]
    return {name: (call, nbytes[name.partition(", numba")[0]]) for name, call in numba_calls(x, *bits).items()}
