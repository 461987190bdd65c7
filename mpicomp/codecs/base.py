"""What a codec is: a way to turn values into bytes and back, without state and without MPI.

Values and payload are in one memory. Codecs with `encodes_on_devices` also take tensors on a GPU, and then leave all
work to it: by `mpicomp.kernels.beside` they find the kernels. What they raise on the host of values that are not
finite they return there, as a flag, since finding it out would take waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels.streams import Stream, source

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Draw:
    """Where in a random stream a codec draws.

    Attributes
    ----------
    stream : Stream
    step : int
    rank : int
    ordinal : int
        Merges made into these elements before.
    offset : int
        Index of the first element in its vector; a multiple of 512.
    """

    stream: Stream
    step: int
    rank: int
    ordinal: int = 0
    offset: int = 0

    @property
    def source(self) -> np.uint64:
        """Counter word of rank and ordinal."""
        return source(self.rank, self.ordinal)


@runtime_checkable
class Codec(Protocol):
    """Stateless; implementations are frozen dataclasses.

    Attributes
    ----------
    alignment : int
        Chunk boundaries fall on multiples of this many elements.
    """

    @property
    def alignment(self) -> int:
        """Elements."""
        ...

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Exact payload size of `n` elements that speak for `weight` ranks."""
        ...

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> Any:
        """Overwrite `payload`, of exactly `nbytes(n)`.

        Raises ValueError for NaN or infinity among the values, and OverflowError for finite ones that have no code; on
        a device returns instead whether all is well, bool[]. The payload then holds nothing that means anything.
        """
        ...

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """`values` is overwritten. Raises ValueError for a payload of the wrong size."""
        ...


class Mergeable(Codec, Protocol):
    """A codec whose payloads can be merged without decoding them.

    `merge` is the contract's reference form, which tests and benchmarks call. Reducers call what the codec's `bind`
    returns: the merge on a device's kernels, with working memory of its own; see `mpicomp.codecs.sign.Sign.bind`.
    """

    def merge(
        self, held: Bytes, incoming: Bytes, n: int, *, held_weight: int, incoming_weight: int, draw: Draw
    ) -> None:
        """`held` is overwritten and then speaks for both."""
        ...


class Extended(Codec, Protocol):
    """What some codecs have beside; callers look for each by its name.

    Attributes
    ----------
    out_of_range : str
        Of codecs whose `encode` raises OverflowError for finite values: which these are, and what to do about it, as
        the end of a sentence; empty: there is nothing to say that does not hold of every sum.
    encodes_on_devices : bool
        Whether values and payload may be on a device.
    """

    encodes_on_devices: ClassVar[bool]

    @property
    def out_of_range(self) -> str:
        """For messages."""
        ...

    def encode_keeping(self, values: NDArray[Any], residual: NDArray[Any], payload: Bytes, left: NDArray[Any]) -> Any:
        """As `encode` for p = values + residual; `left` is overwritten with p less what `decode` makes of it."""
        ...

    def encode_telling(self, values: NDArray[Any], payload: Bytes, sent: NDArray[Any], *, draw: Draw) -> Any:
        """As `encode`; `sent` is overwritten with what `decode` makes of the payload."""
        ...

    def decode_drawn(self, payload: Bytes, values: NDArray[Any], *, draw: Draw) -> None:
        """As `decode`, where it is known from where `encode` drew: the host need not look at the payload."""
        ...

    def add(self, payload: Bytes, sums: NDArray[Any]) -> None:
        """Add what `decode` would write to `sums`, in one pass. Raises ValueError for a payload of the wrong size."""
        ...

    def used(self, payload: Bytes, n: int) -> int:
        """Bytes of a payload of `n` elements that decoding needs, where `nbytes` is the most that one may take.

        The payload's own size at most, whatever it holds.
        """
        ...


def sent_bytes(codec: Codec, payload: Bytes, n: int) -> int:
    """Bytes of a payload of `n` elements that must be sent."""
    used = getattr(codec, "used", None)
    return payload.size if used is None else used(payload, n)


def varies(codec: Codec) -> bool:
    """Whether payloads of equally many elements are sent in different lengths."""
    return hasattr(codec, "used") and getattr(codec, "coding", None) != "fixed"


def encodes_on_devices(codec: Any) -> bool:
    """Whether values and payload may be on a device."""
    return bool(getattr(codec, "encodes_on_devices", False))


def checked(finite: Any) -> Any:
    """Raise ValueError if it is known that not all values are finite; what a device has yet to tell is returned."""
    if isinstance(finite, bool | np.bool_) and not finite:
        raise ValueError("the values contain NaN or infinity")
    return finite


def check_size(codec: Any, payload: Bytes, n: int, weight: int) -> None:
    """Raise ValueError unless the payload has the size that `n` elements need."""
    expected, found = codec.nbytes(n, weight), len(payload)
    if found != expected:
        raise ValueError(f"{codec}: a payload of {n} elements has {expected} bytes, this one {found}: it is damaged")
