"""A decoder of `mpicomp.codecs.entropy`'s payloads in plain integers, from their description."""

from __future__ import annotations

from collections.abc import Iterator


def decode(payload: bytes, levels: int, n: int) -> list[int]:
    """The n symbols of a payload that is not damaged."""
    together = max(w for w in range(1, 9) if levels**w <= 256)
    n_packed = -(-n // together)
    if payload[0] == 0:
        packed = list(payload[1:])
        assert len(packed) == n_packed
    else:
        states = [int.from_bytes(payload[at : at + 4], "little") for at in (1, 5, 9, 13)]
        packed = list(_coded(payload[17:], states, n_packed, levels**together))
    symbols = [code // levels**place % levels for code in packed for place in reversed(range(together))]
    return symbols[:n]


def _coded(rest: bytes, states: list[int], n_packed: int, alphabet: int) -> Iterator[int]:
    bits = min(14, n_packed.bit_length())
    number, at = int.from_bytes(rest, "little"), 0
    owners: list[tuple[int, int, int]] = []  # of each slot: super-symbol, frequency, first slot
    for symbol in range(alphabet):
        length = 0
        while not number >> at & 1:
            length, at = length + 1, at + 1
        frequency = (1 << length | number >> (at + 1) & ((1 << length) - 1)) - 1
        at += 1 + length
        owners += [(symbol, frequency, len(owners))] * frequency
    assert len(owners) == 1 << bits
    words = rest[-(-at // 8) :]
    taken = 0
    for i in range(n_packed):
        state = states[i % 4]
        slot = state % (1 << bits)
        symbol, frequency, start = owners[slot]
        state = frequency * (state >> bits) + slot - start
        if state < 1 << 15:
            state = state << 16 | words[taken] | words[taken + 1] << 8
            taken += 2
        states[i % 4] = state
        yield symbol
    assert taken == len(words)
    assert states == [1 << 15] * 4
