"""Payloads of pieces and results of pieces, where vectors are encoded: in the host's memory or on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from collectives.annotations import Array, Bytes, Testable
from collectives.arrays import after_copy
from collectives.arrays.elements import NARROW, aligned_empty
from mpicomp import kernels
from mpicomp.codecs.base import Codec, Finite, is_variable, varies
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.feedback.base import compute_type, narrow_into
from mpicomp.spaces import Space
from mpicomp.spaces.finite_flag import FiniteFlag

QUIET = np.errstate(over="ignore", invalid="ignore")
"""NumPy does not warn of values that are not finite: the ranks look for them and report them."""
FLAG_BYTES = 16  # in front of a payload on a device: copies begin at multiples of 16
ALIGNMENT = 64  # bytes that each payload begins at a multiple of
Decode = Callable[[Array, Array], Finite]
"""Overwrites a piece of the result, float32 or float64, and on the host as many elements of scratch.

It returns whether the result is finite, or None where it has not looked."""


def buffers(sizes: Sequence[int], alignment: int = ALIGNMENT) -> list[Bytes]:
    """Return one array of each size in bytes, at multiples of `alignment` in an array that begins at a page."""
    starts = np.cumsum([0, *(-(-size // alignment) * alignment for size in sizes)]).tolist()
    whole = aligned_empty(starts[-1], np.uint8)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def codec_in(space: Space, codec: Codec) -> Codec:
    """Return the form of a codec that a space encodes: a device without entropy coding, which the host adds."""
    if not space.is_host and isinstance(codec, Quantizer) and codec.coding != "fixed":
        return codec.fixed
    return codec


class Payloads:
    """Payloads of pieces.

    Parameters
    ----------
    space : Space
        Where vectors are encoded.
    codec : Codec
    lengths : sequence of int
        Elements of each piece.
    flags : bool
        A device's flags of finite payloads cross with them.
    sizes : sequence of int, optional
        Bytes of each payload; None: as many as the codec needs for its length.
    used : callable, optional
        ``used(payload, length)`` returns the bytes that are sent; None: those that the codec needs.

    Attributes
    ----------
    codec : Codec
        Encodes to `there`, and decodes from it.
    there : list of vectors of bytes
        Payloads where vectors are encoded.
    finite : list of FiniteFlag
        Whether all that a payload was made of is finite; zeros are sent for the rest. Empty on the host.
    host : list of uint8 arrays
        Payloads where they are sent from and received: on the host the same arrays.
    varies : bool
        Payloads of one length may be sent without their unused ends.
    """

    def __init__(
        self,
        space: Space,
        codec: Codec,
        lengths: Sequence[int],
        flags: bool = True,
        sizes: Sequence[int] | None = None,
        used: Callable[[Bytes, int], int] | None = None,
    ) -> None:
        self.codec, self._lengths, self._is_host = codec_in(space, codec), lengths, space.is_host
        self._used = codec.count_used if used is None and is_variable(codec) else used
        self.varies = varies(codec) if used is None else True
        sizes = list(map(self.codec.nbytes, lengths)) if sizes is None else sizes
        self.there: list[Array]
        self.finite: list[FiniteFlag] = []
        if self._is_host:
            self.host = self.there = buffers(sizes)
            return
        room = (ALIGNMENT + -(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        starts = accumulate(room, initial=ALIGNMENT)
        self._extents = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._mirror = space.mirror(space.zeros(self._extents[-1].stop if sizes else 0, "uint8"))
        self.there = [self._mirror.there[extent] for extent in self._extents]
        if flags:
            places = [slice(extent.start - FLAG_BYTES, extent.start - FLAG_BYTES + 1) for extent in self._extents]
            self.finite = [space.flag((self._mirror.there[at], self._mirror.here[at])) for at in places]
        self._crossing = self.host = [self._mirror.here[extent] for extent in self._extents]
        self._recoder: Array = None if self.codec is codec else codec
        if self._recoder is not None:
            self.host = buffers([codec.nbytes(n) for n in lengths])

    def count_sent(self, piece: int) -> int:
        """Return the bytes of a payload that are sent, from `host`."""
        payload = self.host[piece]
        return payload.size if self._used is None else self._used(payload, self._lengths[piece])

    def rows(self, piece: int, of_rank: int) -> Array:
        """Return the payloads of a piece of all ranks on a device as rows: uint8[ranks, nbytes].

        piece : number of the first rank's. of_rank : pieces of each rank, as long as those of the first.
        """
        extents = self._extents[piece::of_rank]
        first, last = extents[0], extents[-1]
        step = extents[1].start - first.start if len(extents) > 1 else ALIGNMENT
        return self._mirror.there[first.start : last.stop].unfold(0, first.stop - first.start, step)

    def fetch(self, piece: int) -> Testable | None:
        """Copy a payload and its flag to `host`; returns a handle, or None where they are there."""
        if self._is_host:
            return None
        extent = self._extents[piece]
        if not self.finite:
            return self._mirror.fetch(extent)
        copy = self._mirror.fetch(slice(extent.start - FLAG_BYTES, extent.stop))
        return after_copy(copy, partial(self._land, piece))

    def _land(self, piece: int) -> None:
        if not self.finite[piece].landed:
            self._crossing[piece][:] = 0  # decodes to zeros in every codec, so no owner fails for this rank
        if self._recoder is not None:
            self._recoder.from_fixed(self._crossing[piece], self._lengths[piece], self.host[piece])

    def deliver(self, piece: int) -> None:
        """Copy a payload from `host`, for kernels that are launched from now on."""
        if self._is_host:
            return
        if self._recoder is not None:
            self._recoder.to_fixed(self.host[piece], self._lengths[piece], self._crossing[piece])
        self._mirror.deliver(self._extents[piece])


class Scratch(threading.local):
    """A thread's memory of the host for the mean of a piece, and for the payload that is added to it."""

    def __init__(self, longest: int, dtype: type[np.floating]) -> None:
        self.mean, self.decoded = np.empty(longest, dtype), np.empty(longest, dtype)


class Results:
    """The result of a step. Several threads may write different pieces at once.

    Parameters
    ----------
    space : Space
    dtype : str
        Of the result.
    longest : int
        Elements of the longest piece.

    Attributes
    ----------
    scratch : Scratch
    finite : FiniteFlag
        Whether the step's result is finite: the same on all ranks. On a device it is known once all pieces are there.
    """

    def __init__(self, space: Space, dtype: str, longest: int) -> None:
        self._space, self._dtype = space, dtype
        self._narrow, self.scratch = dtype in NARROW, Scratch(longest, compute_type(dtype))
        self.finite, self._out = space.flag(), None
        self._wide = space.zeros(0, "float32").dtype

    def begin(self, out: Array) -> None:
        """Write to another result; None: drop the reference to it."""
        self._out = out
        if out is not None:
            self.finite.reset()

    def write(self, cut: range, decode: Decode) -> Testable | None:
        """Let `decode` write the elements `cut`, which are rounded where the result has 16 bits."""
        out = self._out[cut.start : cut.stop]  # type: ignore[index]
        self._space.launch(self._write, out, decode)
        return self.finite.fetch()

    @QUIET
    def _write(self, out: Array, decode: Decode) -> None:
        n = len(out)
        if self._space.is_host:
            part, decoded = self.scratch.mean[:n] if self._narrow else out, self.scratch.decoded[:n]
        else:
            part, decoded = out.new_empty(n, dtype=self._wide) if self._narrow else out, None
        finite = self.finite.check(decode, part, decoded)
        if self._narrow:
            self.finite.check(narrow_into, part, self._dtype, self._space.words(out))
        elif finite is None:
            self.finite.check(kernels.beside(out).sign.all_finite, out)
