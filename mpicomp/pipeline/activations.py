"""How rows travel between two stages: as they are, or as differences to the last message of the same example.

AQ-SGD (Wang et al., "Fine-tuning language models over slow networks using activation quantization with guarantees",
NeurIPS 2022). Both ends of a cut keep the last message m of every example, with activations a::

    first visit:  a travels in full precision;       both set m <- a
    later:        d = Q(a - m) travels;              both set m <- m + d
                  the next stage runs on m

`Direct` sends Q(a) each time, which is what the paper calls DirectQ; gradients of activations travel like that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mpicomp.codecs.base import Bytes
from mpicomp.codecs.rows_base import DeltaCodec, RowCodec, Rows
from mpicomp.codecs.rows_full import FullRows
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

    def stamps(self) -> Stamps | None:
        """Visits of all examples; None: nothing is kept of them."""
        ...

    def forget(self, ids: Ids, theirs: Stamps) -> None:
        """Have these examples sent in full precision the next time; `theirs` are the other end's stamps of them."""
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


class Compression(Protocol):
    """Options of one direction, the same on all stages."""

    def start(self, seed: int, cut: int, end: str) -> Coding:
        """One end of a cut, "before" or "after" it."""
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

    def start(self, seed: int, cut: int, end: str) -> DirectCoding:
        """See `Compression`."""
        return DirectCoding(self.codec, Stream(seed, cut, "direct rows"))


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
        Keep messages in files there, one for each end of a cut, and not in memory; the same on all stages.
    run : str
        What stands for this run and model: a file of another one is refused.
    stored : RowCodec, optional
        Keep messages in fewer bits; None: float32.
    check_every : int
        Steps between two comparisons of what the two ends of a cut have kept.
    """

    codec: DeltaCodec
    examples: int
    folder: str | Path | None = None
    run: str = ""
    stored: RowCodec | None = None
    check_every: int = 100

    def __post_init__(self) -> None:
        for name in ("examples", "check_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r:.80}")
        if not hasattr(self.codec, "encode_delta"):
            raise TypeError(
                f"{self.codec!r:.80} sends no differences: pass another codec, such as RowQuantizer(bits=3)"
            )

    def start(self, seed: int, cut: int, end: str) -> DeltaCoding:
        """See `Compression`."""
        stream, make_store = Stream(seed, cut, "row differences"), partial(self._store, f"cut-{cut}-{end}")
        return DeltaCoding(self.codec, stream, self.examples, self.check_every, make_store)

    def _store(self, name: str, row_shape: tuple[int, ...]) -> Store:
        if self.folder is None:
            return MessageStore(self.examples, row_shape, codec=self.stored)
        path = Path(self.folder) / name
        return FileMessageStore(path, self.examples, row_shape, codec=self.stored, fingerprint=self.run)
