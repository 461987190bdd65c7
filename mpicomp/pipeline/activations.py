"""How rows travel between two stages: as they are, or as differences to the last message of the same example.

AQ-SGD (Wang et al., "Fine-tuning language models over slow networks using activation quantization with guarantees",
NeurIPS 2022). Both ends of a cut keep the last message m of every example, with activations a::

    first visit:  a travels in full precision;       both set m <- a
    later:        d = Q(a - m) travels;              both set m <- m + d
                  the next stage runs on m

`Direct` sends Q(a) each time, which is what the paper calls DirectQ; gradients of activations travel like that.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mpicomp.codecs import options
from mpicomp.codecs.base import Bytes
from mpicomp.codecs.rows import FullRows
from mpicomp.codecs.rows.row_codec import DeltaCodec, RowCodec, Rows
from mpicomp.kernels.streams import Stream
from mpicomp.pipeline.delta_coding import DeltaCoding
from mpicomp.pipeline.direct_coding import DirectCoding
from mpicomp.pipeline.file_store import FileMessageStore
from mpicomp.pipeline.memory_store import MessageStore
from mpicomp.pipeline.rows import Ids
from mpicomp.pipeline.stamps import Stamps
from mpicomp.pipeline.store import Store


class Coding(Protocol):
    """One direction of a cut, on one of its ends; what is kept changes at `commit`, never before."""

    def check(self, ids: Ids | None) -> None:
        """Raise TypeError or ValueError unless a step of these examples can be coded."""
        ...

    def prepare(self, row_shape: tuple[int, ...]) -> None:
        """Make room for what is kept of rows of this shape; raises ValueError, OSError or MemoryError."""
        ...

    def nbytes(self, ids: Ids, row_shape: tuple[int, ...]) -> int:
        """Of a payload: equal on both ends."""
        ...

    def prefetch(self, ids: Ids) -> None:
        """These examples are the next."""
        ...

    def encode(self, rows: Rows, ids: Ids, payload: Bytes) -> None:
        """Overwrite the payload. Raises ValueError for NaN and infinity, OverflowError for rows out of range."""
        ...

    def decode(self, payload: Bytes, ids: Ids, row_shape: tuple[int, ...]) -> Rows:
        """What the rows are on both ends, in memory of their own."""
        ...

    def commit(self) -> None:
        """The step has ended well; raises OSError where what is to be kept cannot be written."""
        ...

    def roll_back(self) -> None:
        """The step has failed on some stage."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; ValueError, and nothing has changed, if it is of something else."""
        ...

    def pairing(self) -> Stamps | None:
        """Return the words that the other end needs for `settle`, equally many there; None: no messages are kept."""
        ...

    def settle(self, mine: Stamps, theirs: Stamps) -> int:
        """Forget the examples whose messages are not those of the other end; return how many.

        `mine` and `theirs` are the results of `pairing` on both ends.
        """
        ...

    def forget_all(self) -> None:
        """Have all examples sent in full precision the next time."""
        ...

    def checksum(self) -> int | None:
        """Of what was kept since the last call, equal on both ends; None: it is not time for one."""
        ...

    def digest(self) -> int:
        """Of all that is kept, as 63 bits that are equal on both ends; 0: nothing is."""
        ...

    def close(self) -> None:
        """Let go of what is kept, and of its file."""
        ...


@dataclass(frozen=True, slots=True)
class CodingPlace:
    """Place of a coding, which determines its random words.

    Attributes
    ----------
    direction : int
        Number of the cut and direction: activations have even numbers.
    end : "before" or "after"
        The cut.
    part : int
        Number of the tensor, of those that travel together.
    seed : int
        Of stochastic rounding.
    pipeline : int
        Number of the pipeline, of those side by side.
    """

    direction: int
    end: str = ""
    part: int = 0
    seed: int = 0
    pipeline: int = 0

    def stream(self, purpose: str) -> Stream:
        """Return the random words that both ends draw."""
        return Stream(self.seed, self.direction, f"{purpose} {self.part}" if self.part else purpose)


class Compression(Protocol):
    """Options of one direction, the same on all stages."""

    def start(self, place: CodingPlace) -> Coding:
        """Return the coding of one tensor on one end of a cut."""
        ...


@dataclass(frozen=True)
class Direct:
    """Each message by itself.

    Parameters
    ----------
    codec : RowCodec
        ``FullRows()``: float32; ``FullRows("float16")``; ``RowQuantizer(bits=4)``: DirectQ; for gradients also
        ``TopRows(0.2, RowQuantizer(8))``: the largest fifth.
    """

    codec: RowCodec = field(default_factory=FullRows)

    def start(self, place: CodingPlace) -> DirectCoding:
        """See `Compression`."""
        return DirectCoding(self.codec, place.stream("direct rows"), place.pipeline)


@dataclass(frozen=True)
class Deltas:
    """Differences to the example's last message: AQ-SGD.

    Parameters
    ----------
    codec : DeltaCodec
        Of the differences, such as ``RowQuantizer(bits=3)``.
    examples : int
        The ids given to `PipelineStage.step` are 0 to examples - 1. Augmented examples need an id for each variant,
        such as ``2 * id + flipped``.
    folder : str or Path, optional
        Keep messages in files there, one for each end of a cut, and not in memory; the same on all stages. It is made
        if it is not there.
    run : str
        Name of this run and model: a file of another one is refused, and a run of the same name goes on from the
        messages that both ends of a cut have. Without a name, messages in files serve a run again only once it has
        loaded its state.
    stored : RowCodec, optional
        Keep messages in fewer bits; None: float32.
    check_every : int
        Steps between two comparisons of the messages that the two ends of a cut have kept.
    """

    codec: DeltaCodec
    examples: int
    folder: str | Path | None = None
    run: str = ""
    stored: RowCodec | None = None
    check_every: int = 100

    def __post_init__(self) -> None:
        for name in ("examples", "check_every"):
            options.integer(self, name, 1)
        if not hasattr(self.codec, "encode_delta"):
            raise TypeError(
                f"{self.codec!r:.80} sends no differences: pass another codec, such as RowQuantizer(bits=3)"
            )
        if getattr(self.codec, "rounding", "") == "stochastic" and getattr(self.codec, "bits", 0) == 2:
            # Of rows of 256 normal values. Differences shrink from visit to visit only below 0.707.
            warnings.warn(
                f"{self.codec!r:.80} errs by 0.84 of a difference's norm, and AQ-SGD is known to converge below 0.707: "
                "use rounding='nearest', which errs by 0.44, or 3 bits",
                stacklevel=3,
            )

    def start(self, place: CodingPlace) -> DeltaCoding:
        """See `Compression`."""
        name = f"cut-{place.direction}-{place.end}" + (f"-{place.part}" if place.part else "")
        return DeltaCoding(
            self.codec,
            place.stream("row differences"),
            self.examples,
            self.check_every,
            partial(self._store, name),
            place.pipeline,
        )

    def _store(self, name: str, row_shape: tuple[int, ...], resuming: bool) -> Store:
        if self.folder is None:
            return MessageStore(self.examples, row_shape, codec=self.stored)
        path = Path(self.folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        store = FileMessageStore(path, self.examples, row_shape, codec=self.stored, fingerprint=self.run)
        if not (resuming or self.run):  # the file may be that of any run before
            store.forget_all()
            store.pair = 0  # so that the states of those runs do not take the file for theirs
        return store
