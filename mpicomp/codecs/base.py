"""Contract of codecs, which turn values into bytes and back without state and without MPI.

Values and payload lie in one memory. Codecs with `encodes_on_devices` take tensors on a GPU too, find the kernels by
`mpicomp.kernels.beside`, and leave all work to the device. They return a flag where they raise on the host, since
reading the flag would mean waiting for the device.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np

from collectives.annotations import Array, override
from collectives.annotations import Bytes as Bytes
from mpicomp import kernels
from mpicomp.kernels.streams import GROUP, Stream, bernoulli_table, shared_source, source

Finite: TypeAlias = Any
"""Whether all values have a code: on the host True or None, on a device bool[] that its kernels write."""


_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Draw:
    """Place in a random stream from which a codec draws.

    Parameters
    ----------
    stream : Stream
        Stream of a seed, a vector and a purpose.
    step : int
    rank : int
    ordinal : int
        Merges made into these elements before.
    offset : int
        Index of the first element in its vector; a multiple of 512.
    ranks : int
        Ranks that encode the same elements.

    Examples
    --------
    >>> from mpicomp.codecs import Draw
    >>> from mpicomp.kernels.streams import Stream
    >>> stream = Stream(0, 0, "example")  # seed, vector, purpose
    >>> draws = [Draw(stream, step=step, rank=1) for step in range(3)]
    >>> len({int(draw.source) for draw in draws})  # of a rank and an ordinal, not of a step
    1
    """

    stream: Stream
    step: int
    rank: int
    ordinal: int = 0
    offset: int = 0
    ranks: int = 1

    @property
    def shared_source(self) -> np.uint64:
        """Counter word of all ranks, with the rank's share of `correlated` draws."""
        return shared_source(self.stream, self.step, self.rank, self.ranks)

    @property
    def source(self) -> np.uint64:
        """Counter word of rank and ordinal."""
        return source(self.rank, self.ordinal)

    def words(self, n: int) -> Array:
        """Return uint32[n] of random bits, for codecs with an alignment of 512, which compute by NumPy.

        A piece of a vector draws the words that the whole vector has there.
        """
        drawn = np.empty(8 * _WORD_BITS * -(-n // GROUP), np.uint64)
        first, step = np.uint64(self.offset // GROUP * _WORD_BITS), np.uint64(self.step & 0xFFFFFFFF)
        fair = bernoulli_table(1, 1)
        kernels.of("cpu").philox.draw_words(self.stream.schedule(), first, step, self.source, *fair, drawn[:0], drawn)
        return drawn.view(np.uint32)[:n]


@runtime_checkable
class Codec(Protocol):
    """Turns a vector into a payload and back. Implementations are frozen dataclasses without state.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Clipping, Codec, Draw
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = Clipping(bits=16), np.array([1.0, -0.5, 0.25], np.float32)
    >>> isinstance(codec, Codec), codec.alignment, codec.nbytes(n=3)
    (True, 64, 8)
    >>> payload, decoded = np.empty(codec.nbytes(3), np.uint8), np.empty_like(values)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> codec.decode(payload, decoded, weight=1)
    >>> decoded.tolist()
    [1.0, -0.5, 0.25]
    """

    __slots__ = ()

    @property
    def alignment(self) -> int:
        """Number of elements that chunk boundaries are multiples of."""
        ...

    @property
    def encodes_on_devices(self) -> bool:
        """True if values and payload may lie on a device."""
        return False

    @property
    def out_of_range(self) -> str:
        """End of a sentence that names values with OverflowError and their cure; "" without such a sentence."""
        return ""

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Return the bytes of the payload of `n` elements that `weight` ranks contributed to.

        The size is exact, or for a `VariableCodec` the largest possible one.
        """
        ...

    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        """Encode values.

        Parameters
        ----------
        values : float32[n] or float64[n]
            Not changed.
        payload : uint8[nbytes(n)]
            Overwritten.
        draw : Draw
            Random words, for codecs that need them.

        Returns
        -------
        True, None, or bool[] on a device
            False on a device: a value has no code, and the payload is invalid.

        Raises
        ------
        ValueError
            A value is NaN or infinite, or the payload has the wrong size.
        OverflowError
            A finite value has no code.
        """
        ...

    def decode(self, payload: Bytes, values: Array, *, weight: int) -> None:
        """Decode a payload.

        Parameters
        ----------
        payload : uint8[nbytes(n, weight)]
            Not changed.
        values : float32[n] or float64[n]
            Overwritten.
        weight : int
            Number of ranks that contributed to the payload.

        Raises
        ------
        ValueError
            The payload has the wrong size, or damage was detected. Undetected damage yields wrong values.
        """
        ...


class Mergeable(Codec, Protocol):
    """A codec whose payloads can be merged without decoding them.

    `merge` is the contract's reference form, for tests and benchmarks. Reducers call the object that `bind` returns,
    which merges by a device's kernels, with working memory of its own; see `mpicomp.codecs.sign.Sign.bind`.

    Examples
    --------
    Each element of a merged payload is the sign of one of the ranks:

    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, Sign
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, draw, decoded = Sign(), Draw(Stream(0, 0, "example"), step=0, rank=0), np.empty(1000, np.float32)
    >>> held, incoming = (np.empty(codec.nbytes(1000), np.uint8) for rank in range(2))
    >>> codec.encode(np.ones(1000, np.float32), held, draw=draw)
    >>> codec.encode(-np.ones(1000, np.float32), incoming, draw=draw)
    >>> codec.merge(held, incoming, 1000, held_weight=1, incoming_weight=1, draw=draw)
    >>> codec.decode(held, decoded, weight=2)
    >>> bool(abs(decoded.mean()) < 0.1)
    True
    """

    __slots__ = ()

    def merge(
        self, held: Bytes, incoming: Bytes, n: int, *, held_weight: int, incoming_weight: int, draw: Draw
    ) -> None:
        """Overwrite `held` with a payload that stands for the ranks of both.

        Parameters
        ----------
        held, incoming : uint8
            Payloads of `n` elements, to which `held_weight` and `incoming_weight` ranks contributed.
        n : int
        held_weight, incoming_weight : int
        draw : Draw
            Random words, for codecs that need them.

        Raises
        ------
        ValueError
            A payload has the wrong size.
        """
        ...


# Optional capabilities, which a codec declares by its bases -----------------------------------------------------------


class VariableCodec(Codec):
    """Base of codecs whose payloads differ in length."""

    __slots__ = ()

    @property
    def varies(self) -> bool:
        """True if payloads of equally many elements differ in length."""
        return True

    @abstractmethod
    def count_used(self, payload: Bytes, n: int) -> int:
        """Return the leading bytes of a payload of `n` elements that decoding needs, at most the payload's own size."""

    def decode_drawn(self, payload: Bytes, values: Array, *, draw: Draw) -> None:
        """Decode a payload that was encoded with `draw`; the host need not read its length if that follows from it."""
        self.decode(payload, values, weight=1)


class FeedbackCodec(Codec):
    """Base of codecs that do a part of error feedback while they encode: fewer passes, to the same bits.

    Attributes
    ----------
    fuses : "sent", "residual" or "decayed residual"
        The codec has `encode_telling`; or `encode_keeping`, which then may take a decay.
    """

    __slots__ = ()

    fuses: ClassVar[Literal["sent", "residual", "decayed residual"]]

    def encode_telling(self, values: Array, payload: Bytes, sent: Array, *, draw: Draw) -> Finite:
        """Encode, and overwrite `sent` with the values that `decode` will write."""
        raise NotImplementedError

    def encode_keeping(self, values: Array, residual: Array, payload: Bytes, left: Array, decay: float = 1.0) -> Finite:
        """Encode p = values + decay residual; overwrite `left` with p minus the values that `decode` will write."""
        raise NotImplementedError


class AveragingCodec(Codec):
    """Base of codecs that decode and add in one pass."""

    __slots__ = ()

    @abstractmethod
    def add(self, payload: Bytes, sums: Array) -> None:
        """Add the values that `decode` would write. Raises ValueError for a payload of the wrong size."""

    def mean(self, payloads: Array, mean: Array) -> Finite:
        """Overwrite `mean` with the payloads' mean, added up in rank order; return whether it is finite."""
        # payloads: uint8[ranks, nbytes] on the device of the mean; only rows need be contiguous, from multiples of 8
        # bytes; mean: float32[n] or float64[n]
        self.decode(payloads[0], mean, weight=1)
        for payload in payloads[1:]:
            self.add(payload, mean)
        on = kernels.beside(mean)
        if len(payloads) > 1:
            on.arrays.divide(mean, len(payloads))
        return on.sign.all_finite(mean)


class SpreadingCodec(AveragingCodec):
    """Base of codecs that decode, and decode and add, by one method."""

    __slots__ = ()

    @override
    def decode(self, payload: Bytes, values: Array, *, weight: int) -> None:
        self._spread(payload, values, weight, adding=False)

    @override
    def add(self, payload: Bytes, sums: Array) -> None:
        self._spread(payload, sums, 1, adding=True)

    @abstractmethod
    def _spread(self, payload: Bytes, out: Array, weight: int, adding: bool) -> None:
        """Write the decoded values to `out`, or with `adding` add them."""


@cache
def _derives(kind: type, base: type) -> bool:
    # protocols answer `isinstance` in Python, which costs a short step a microsecond for each piece
    return issubclass(kind, base)


def is_variable(codec: Codec) -> TypeGuard[VariableCodec]:
    """Return whether payloads may be shorter than `nbytes`."""
    return _derives(type(codec), VariableCodec)


def has_residual(codec: Codec) -> TypeGuard[FeedbackCodec]:
    """Return whether the codec encodes and updates a residual in one pass."""
    return _derives(type(codec), FeedbackCodec)


def is_averaging(codec: Codec) -> TypeGuard[AveragingCodec]:
    """Return whether the codec adds and averages payloads itself."""
    return _derives(type(codec), AveragingCodec)


def sent_bytes(codec: Codec, payload: Bytes, n: int) -> int:
    """Return the bytes of a payload of `n` elements that must be sent."""
    return codec.count_used(payload, n) if is_variable(codec) else payload.size


def varies(codec: Codec) -> bool:
    """Return whether payloads of equally many elements differ in length."""
    return is_variable(codec) and codec.varies


def require_finite(finite: Finite) -> Finite:
    """Raise ValueError if not all values are finite. A device's flag, whose value is not known yet, is returned."""
    if isinstance(finite, bool | np.bool_) and not finite:
        raise ValueError("the values contain NaN or infinity")
    return finite


def check_size(codec: Codec, payload: Bytes, n: int, weight: int) -> None:
    """Raise ValueError unless the payload has the size that `n` elements need.

    Parameters
    ----------
    codec : Codec
    payload : uint8
    n : int
        Number of elements.
    weight : int
        Number of ranks that contributed.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Sign
    >>> from mpicomp.codecs.base import check_size
    >>> check_size(Sign(), np.zeros(16, np.uint8), n=100, weight=1)
    >>> check_size(Sign(), np.zeros(16, np.uint8), n=10, weight=1)
    Traceback (most recent call last):
        ...
    ValueError: Sign(): a payload of 10 elements has 8 bytes, this one 16: it is damaged
    """
    expected, found = codec.nbytes(n, weight), len(payload)
    if found != expected:
        raise ValueError(f"{codec}: a payload of {n} elements has {expected} bytes, this one {found}: it is damaged")
