"""Descriptions of calls: the bits that ranks compare, and the difference that the message of a mismatch shows."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.progress.polling import wait
from collectives.quoting import list_ranks

MARK_BITS = (1 << 62) - 1  # of a fingerprint
LONGEST_SHOWN = 200  # characters of a description with parts, in a message that cannot name the part
_BETWEEN_PARTS, _IN_PART = "\x1f", "\x1e"


class Description(str):
    """Description of a call in words and in parts; the message of a mismatch has the first part that differs."""

    __slots__ = ("wire",)
    wire: str

    def __new__(cls, text: str, kind: str, parts: Sequence[str | tuple[str, str]]) -> Description:
        """Return the text, with its parts."""
        made = super().__new__(cls, text)
        # the first text of a pair is compared, the second one shown; calls of one kind have the same parts in order
        pairs = [(one, one) if isinstance(one, str) else one for one in parts]
        made.wire = _BETWEEN_PARTS.join([text, kind, *map(_IN_PART.join, pairs)])
        return made

    @property
    def brief(self) -> str:
        """Kind of the call and its first part, for a `repr`."""
        _, kind, first, *_ = self.wire.split(_BETWEEN_PARTS)
        shown = first.split(_IN_PART)[1]
        return shown if shown.startswith(kind) else f"{kind} of {shown}"


def fingerprint(text: str) -> int:
    """Return 62 bits that stand for a description."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & MARK_BITS


def difference(texts: Mapping[int, str]) -> str:
    """Return the first part in which the descriptions of the ranks differ, or else the whole descriptions."""
    split = {rank: texts[rank].split(_BETWEEN_PARTS) for rank in sorted(texts)}  # as `Description.wire` has them
    kinds = {tuple(text[1:2]) for text in split.values()}
    if len(kinds) == 1 and kinds != {()}:
        kind = kinds.pop()[0]
        for place in range(2, min(map(len, split.values()))):
            # not `split`: a name, or a damaged description, may have the separator once more or not at all
            parts = {rank: text[place].partition(_IN_PART) for rank, text in split.items()}
            if len({compared for compared, _, _ in parts.values()}) > 1:
                return f", {kind}: {_list_texts({rank: shown for rank, (_, _, shown) in parts.items()})}"
    return f": {_list_texts({rank: _shorten(*text) for rank, text in split.items()})}"


def _shorten(text: str, *parts: str) -> str:
    return f"{text[:LONGEST_SHOWN]} ..." if parts and len(text) > LONGEST_SHOWN else text


def _list_texts(texts: Mapping[int, str]) -> str:
    """Return each text behind the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{list_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())


def gather_texts(comm: MPI.Comm, text: str, timeout_s: float) -> list[str]:
    """Return every rank's text, in rank order; collective, with no call of `comm` in flight."""
    return [one.decode() for one in gather_bytes(comm, text.encode(), timeout_s)]


def gather_objects(comm: MPI.Comm, obj: object, timeout_s: float) -> list[Any]:
    """Like `gather_texts`, of objects that can be pickled."""
    return [pickle.loads(one) for one in gather_bytes(comm, pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), timeout_s)]


def gather_bytes(comm: MPI.Comm, content: bytes, timeout_s: float) -> list[bytes]:
    """Return the bytes of all ranks in rank order, as `gather_texts` does with texts; collective."""

    def waiting() -> str:
        return f"rank {comm.rank} of {comm.size}: not all ranks report (look for one that stopped)"

    mine = np.frombuffer(content, np.uint8)
    lengths = np.zeros(comm.size, np.int64)
    wait(comm.Iallgather(np.array([mine.size], np.int64), lengths), timeout_s, waiting)
    everything = np.empty(int(lengths.sum()), np.uint8)
    wait(comm.Iallgatherv(mine, [everything, lengths]), timeout_s, waiting)
    ends = np.cumsum(lengths)
    return [bytes(everything[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
