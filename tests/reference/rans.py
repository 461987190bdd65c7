"""A decoder of `mpicomp.codecs.rans`'s payloads in plain integers, from their description."""

from __future__ import annotations

from collections.abc import Iterator


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
        packed = list(_coded(payload[1 + 4 * count :], states, -(-n // together), levels**together))
    symbols = [code // levels**place % levels for code in packed for place in reversed(range(together))]
    return symbols[:n]


def _coded(rest: bytes, states: list[int], n_packed: int, alphabet: int) -> Iterator[int]:
    bits = min(14, n_packed.bit_length())
    owners, taken = _owners(rest, 1 << bits)
    assert max(owners)[0] < alphabet
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


def _owners(rest: bytes, slots: int) -> tuple[list[tuple[int, int, int]], int]:
    """Super-symbol, frequency and first slot, of each slot; and the bytes that this is written in."""
    bits = "".join(f"{byte:08b}"[::-1] for byte in rest)
    at, symbol, owners = 0, 0, list[tuple[int, int, int]]()

    def gamma() -> int:
        nonlocal at
        length = bits.index("1", at) - at
        at += 2 * length + 1
        return 1 << length | int("0" + bits[at - length : at][::-1], 2)

    while len(owners) < slots:
        frequency = gamma() - 1
        owners += [(symbol, frequency, len(owners))] * frequency
        symbol += 1 if frequency else gamma()
    return owners, -(-at // 8)
