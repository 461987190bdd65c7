"""A decoder of `mpicomp.codecs.rans`'s payloads in plain integers, from their description."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpicomp.kernels.cpu import rans


def decode(payload: bytes, levels: int, n: int) -> list[int]:
    """The n symbols of a payload that is not damaged."""
    together = max(w for w in range(1, 9) if levels**w <= 256)
    if payload[0] == 0:
        packed = list(payload[1:])
        assert len(packed) == -(-n // together)
    else:
        count = 1 if n <= 8192 else 4
        together = 1 if n <= 8192 else together
        states = [int.from_bytes(payload[at : at + 4], "little") for at in range(1, 1 + 4 * count, 4)]
        n_packed, rest = -(-n // together), payload[1 + 4 * count :]
        bits = min(14, n_packed.bit_length())
        frequencies, taken = _frequencies(rest, 1 << bits)
        if payload[0] == 2:
            frequencies = _by_symbols(frequencies, levels, together, n_packed, bits)
        assert len(frequencies) <= levels**together
        packed = list(_coded(rest[taken:], states, n_packed, frequencies, bits))
    symbols = [code // levels**place % levels for code in packed for place in reversed(range(together))]
    return symbols[:n]


def _coded(rest: bytes, states: list[int], n_packed: int, frequencies: list[int], bits: int) -> Iterator[int]:
    owners = list[tuple[int, int, int]]()  # super-symbol, frequency and first slot, of each slot
    for symbol, frequency in enumerate(frequencies):
        owners += [(symbol, frequency, len(owners))] * frequency
    taken = 0
    for i in range(n_packed):
        state = states[i % len(states)]
        slot = state % (1 << bits)
        symbol, frequency, start = owners[slot]
        state = frequency * (state >> bits) + slot - start
        if state < 1 << 15:
            state = state << 16 | rest[taken] | rest[taken + 1] << 8
            taken += 2
        states[i % len(states)] = state
        yield symbol
    assert taken == len(rest)
    assert set(states) == {1 << 15}


def _frequencies(rest: bytes, total: int) -> tuple[list[int], int]:
    """Numbers that add up to `total`, and the bytes that these are written in."""
    bits = "".join(f"{byte:08b}"[::-1] for byte in rest)
    at, found = 0, list[int]()

    def gamma() -> int:
        nonlocal at
        length = bits.index("1", at) - at
        at += 2 * length + 1
        return 1 << length | int("0" + bits[at - length : at][::-1], 2)

    while sum(found) < total:
        found.append(gamma() - 1)
        if not found[-1]:
            found += [0] * (gamma() - 1)
    return found, -(-at // 8)


def _by_symbols(sent: list[int], levels: int, together: int, n_packed: int, bits: int) -> list[int]:
    """Products of the symbols' frequencies out of 2^30, at least 1 where there is a mark, as frequencies."""
    sent += [0] * (levels + levels**together - len(sent))
    expected = np.zeros(levels**together, np.int64)
    for code, mark in enumerate(sent[levels:]):
        product = 1 << 30
        for place in range(together):
            product = product * sent[code // levels**place % levels] >> bits
        expected[code] = (product if product * n_packed >= 1 << 28 else 0) + (mark > 0)
    found = np.empty_like(expected)
    rans.normalise(expected, bits, found)
    return list(found.tolist())
