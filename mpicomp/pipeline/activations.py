"""Compression of activations and their gradients: by themselves, or as differences to the example's last message.

AQ-SGD (Wang et al., "Fine-tuning language models over slow networks using activation quantization with guarantees",
NeurIPS 2022). Both ends of a cut keep the last message m of every example, with activations a::

    first visit:  a travels in full precision;       both set m <- a
    later:        d = Q(a - m) travels;              both set m <- m + d
                  the next stage runs on m

`Direct` sends Q(a) each time; the paper calls it DirectQ. Gradients of activations travel like that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from collectives.annotations import override
from collectives.caller_warning import warn_caller
from mpicomp.codecs import options
from mpicomp.codecs.registry import row_codec
from mpicomp.codecs.rows import FullRows, RowQuantizer
from mpicomp.codecs.rows.row_codec import DeltaCodec, RowCodec
from mpicomp.pipeline.coding import Coding, CodingPlace, DirectCoding
from mpicomp.pipeline.delta_coding import DeltaCoding
from mpicomp.pipeline.message_stores import FileMessageStore, MessageStore
from mpicomp.pipeline.store import Store


class Compression(Protocol):
    """Options of one direction, the same on all stages."""

    def start(self, place: CodingPlace) -> Coding:
        """Return the coding of one tensor on one end of a cut."""
        ...


@dataclass(frozen=True)
class Direct(Compression):
    """Each message by itself.

    Parameters
    ----------
    codec : RowCodec or str
        ``FullRows()``: float32; ``FullRows("float16")``; ``RowQuantizer(bits=4)``: DirectQ; ``LevelRows(levels=16)``;
        for gradients also ``TopRows(0.2, RowQuantizer(8))``: the largest fifth. Or a name with options, such as
        ``"levels:levels=16,bucket=64"`` (`mpicomp.codecs.row_codec`).

    Raises
    ------
    ValueError
        There is no codec of this name, or an option is out of range.

    Examples
    --------
    `PipelineStage` and `SplitClient` take it as `forward` and `backward`:

    >>> from mpicomp.codecs import RowQuantizer
    >>> from mpicomp.pipeline import Direct
    >>> Direct(RowQuantizer(bits=4)).codec.bits
    4
    """

    codec: RowCodec | str = field(default_factory=FullRows)

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", row_codec(self.codec))

    @override
    def start(self, place: CodingPlace) -> DirectCoding:
        return DirectCoding(row_codec(self.codec), place.stream("direct rows"), place.pipeline)


@dataclass(frozen=True)
class Deltas(Compression):
    """Differences to the example's last message: AQ-SGD.

    Parameters
    ----------
    codec : DeltaCodec or str
        Of the differences, such as ``RowQuantizer(bits=3)`` or ``"levels:levels=8"``.
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
    stored : RowCodec or str, optional
        Keep messages in fewer bits; None: float32.
    check_every : int
        Steps between two comparisons of the messages that the two ends of a cut have kept.

    Raises
    ------
    ValueError
        `examples` or `check_every` is below 1, or there is no codec of this name.
    TypeError
        The codec sends no differences.

    References
    ----------
    Wang et al., "Fine-tuning language models over slow networks using activation quantization with guarantees",
    NeurIPS 2022 (arXiv 2206.01299).

    Examples
    --------
    `PipelineStage` has an example of a training step.

    >>> from mpicomp.codecs import RowQuantizer
    >>> from mpicomp.pipeline import Deltas
    >>> deltas = Deltas(RowQuantizer(bits=3), examples=50_000, stored=RowQuantizer(bits=8))
    >>> deltas.check_every
    100
    """

    codec: DeltaCodec | str
    examples: int
    folder: str | Path | None = None
    run: str = ""
    stored: RowCodec | str | None = None
    check_every: int = 100

    def __post_init__(self) -> None:
        for name in ("examples", "check_every"):
            options.integer(self, name, 1)
        object.__setattr__(self, "codec", _delta_codec(self.codec))
        object.__setattr__(self, "stored", None if self.stored is None else row_codec(self.stored))
        if isinstance(self.codec, RowQuantizer) and (self.codec.rounding, self.codec.bits) == ("stochastic", 2):
            # Measured on rows of 256 normal values. Differences shrink from visit to visit only below 0.707.
            warn_caller(
                f"{self.codec!r:.80} errs by 0.84 of a difference's norm, and AQ-SGD is known to converge below 0.707: "
                "use rounding='nearest', which errs by 0.44, or 3 bits",
                UserWarning,
            )

    @override
    def start(self, place: CodingPlace) -> DeltaCoding:
        name = f"cut-{place.direction}-{place.end}" + (f"-{place.part}" if place.part else "")
        codec, stream = _delta_codec(self.codec), place.stream("row differences")
        return DeltaCoding(codec, self.examples, self.check_every, stream, partial(self._store, name), place.pipeline)

    def _store(self, name: str, row_shape: tuple[int, ...], resuming: bool) -> Store:
        stored = None if self.stored is None else row_codec(self.stored)
        if self.folder is None:
            return MessageStore(self.examples, row_shape, codec=stored)
        path = Path(self.folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        store = FileMessageStore(path, self.examples, row_shape, codec=stored, fingerprint=self.run)
        if not (resuming or self.run):  # the file may be that of any run before
            store.forget_all()
            store.pair = 0  # so that the states of those runs do not take the file for theirs
        return store


def _delta_codec(codec: DeltaCodec | str) -> DeltaCodec:
    found = row_codec(codec)
    if not isinstance(found, DeltaCodec):
        raise TypeError(f"{found!r:.80} sends no differences: pass another codec, such as RowQuantizer(bits=3)")
    return found
