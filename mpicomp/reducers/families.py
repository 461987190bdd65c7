"""Options of methods of one kind, from which their parts and the sizes of their messages follow."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from collectives import Communicator
from collectives.annotations import override
from collectives.schedules.broadcast import AllGather
from collectives.schedules.star import Direct
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.codecs.base import Codec
from mpicomp.codecs.options import MOST_ELEMENTS, adopt, integer, number
from mpicomp.codecs.registry import compressor
from mpicomp.codecs.scaled_sign import OneBit
from mpicomp.codecs.top_k import TopK, index_bits
from mpicomp.codecs.vote_counts import Counts
from mpicomp.feedback.chunk_parts import lay_out
from mpicomp.feedback.codes import SharedScales
from mpicomp.feedback.error_feedback import ErrorRule
from mpicomp.feedback.memory import Memory
from mpicomp.feedback.scale_groups import padded_lengths
from mpicomp.reducers.all_gather import all_gather
from mpicomp.reducers.choosers import Chooser
from mpicomp.reducers.full_precision_mean import FullPrecisionMean
from mpicomp.reducers.piece_lengths import piece_elements
from mpicomp.reducers.shared_indices import SharedIndexMean, shared_model
from mpicomp.reducers.vote_count import counts_model
from mpicomp.spaces import space_at

_ONE_BIT = OneBit(1 << 15)


class CodingMethod(Algorithm):
    """Options of methods whose messages are codes: gathered on all ranks, or sent to owners of parts of the vector."""

    @abstractmethod
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> Codec:
        """Return the codec of vectors with tensors of these lengths."""

    def codec_back(self, dtype: str) -> Codec | None:
        """Return the codec of the mean, which owners send back; None: the codes of all ranks are gathered."""
        return None

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return self.codec_for(dtype, ()).encodes_on_devices

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        codec, back = self.codec_for(dtype, (n,) if n else ()), self.codec_back(dtype)

        def nbytes(elements: int, weight: int) -> int:
            return (codec if back is None or weight != ranks else back).nbytes(elements)

        longest = piece_elements(codec, n, piece_bytes, back)
        return MessageModel(nbytes, longest, codec.alignment, Direct() if back else AllGather())


@dataclass(frozen=True)
class GatheringMethod(CodingMethod):
    """Options of methods that gather the codes of all ranks: error rule x codec x all-gather.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> import mpicomp
    >>> from mpicomp.reducers.families import GatheringMethod
    >>> from mpicomp.codecs import Clipping
    >>> @dataclass(frozen=True)
    ... class UpperHalves(GatheringMethod):
    ...     def codec_for(self, dtype, lengths):
    ...         return Clipping(bits=16)
    >>> def average(comm):
    ...     return UpperHalves().start(comm, 2).aggregate(np.array([1.0, 0.5 * comm.rank], np.float32)).tolist()
    >>> mpicomp.run_local(2, average)[0]
    [1.0, 0.25]
    """

    @property
    def seed(self) -> int:
        """Seed of codes that draw; other methods have no such option."""
        return 0

    @property
    def error_rule(self) -> ErrorRule | None:
        """Rule of the residual; None: errors are lost."""
        return None

    @property
    def shared_scales(self) -> SharedScales | None:
        """Scales that the ranks agree on before they encode."""
        return None

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Error rule x codec x all-gather."""
        lengths = padded_lengths(spec.tensor_lengths, spec.n)[0] if spec.n else ()
        codec = self.codec_for(spec.dtype, tuple(map(int, lengths)))
        return all_gather(comm, spec, codec, self.error_rule, self.seed, scales=self.shared_scales)


@dataclass(frozen=True)
class TopKMethod(GatheringMethod):
    """Options of methods whose ranks send their own largest elements.

    Parameters
    ----------
    rate : int
        Number of the vector's elements per element that is sent.
    chunk : int, optional
        Number of elements of which the chunk / rate largest are sent: a multiple of `rate`. None: equal to the rate.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    rate: int = 100
    chunk: int | None = None

    def __post_init__(self) -> None:
        adopt(self, self.codec_for("float32", ()))

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> TopK:
        return TopK(self.rate, self.chunk, dtype == "float64")


@dataclass(frozen=True)
class TwoPassMethod(CodingMethod):
    """Options of methods whose ranks send codes to owners of parts of the vector, which send its mean back.

    Parameters
    ----------
    compressor : Codec or str
        Codec of the first pass.
    seed : int
        Equal on all ranks.

    Raises
    ------
    ValueError
        There is no such compressor, or an option is out of range.
    """

    compressor: Codec | str = _ONE_BIT
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", compressor(self.compressor))
        integer(self, "seed")

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> Codec:
        return compressor(self.compressor)


class VotingMethod(Algorithm):
    """Options of methods whose ranks' signs are counted on the way."""

    def count_bytes(self, elements: int, weight: int, ranks: int) -> int:
        """Return the bytes of a message with the counts of `weight` of `ranks` ranks."""
        return Counts().nbytes(elements, weight)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        return counts_model(n, ranks, piece_bytes, lambda elements, weight: self.count_bytes(elements, weight, ranks))


@dataclass(frozen=True)
class SharedIndices(Algorithm):
    """Options of methods whose ranks all send the same elements: memory x chosen places x a dense mean of few values.

    Parameters
    ----------
    rate, beta, warmup_steps
        As in `mpicomp.ScaleCom`.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    rate: int = 100
    beta: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        integer(self, "rate", 1, MOST_ELEMENTS)
        number(self, "beta", "above 0 and at most 1", lambda beta: 0 < beta <= 1)
        integer(self, "warmup_steps", 0)

    @abstractmethod
    def chooser(self, comm: Communicator, spec: VectorSpec, memory: Memory) -> Chooser:
        """Return the chooser of the places of a vector."""

    @property
    def chunks(self) -> tuple[int | None, bool]:
        """Length of the chunks, None for the rate; and whether a whole tensor is one chunk."""
        return None, False

    @property
    def local_momentum(self) -> tuple[float, bool] | None:
        """Momentum of each rank, and whether it is masked."""
        return None

    def rates_of(self, vector_id: int) -> tuple[int, ...]:
        """Return the rate of each tensor of a vector; a single rate holds for the whole vector."""
        return (self.rate,)

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return True

    @override
    def is_dense(self, step: int) -> bool:
        return step < self.warmup_steps

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Memory x values in full precision x a dense mean of few values.

        Raises
        ------
        ValueError
            There are not as many rates as tensors.
        """
        rates = self.rates_of(spec.vector_id)
        lengths = [spec.n] if len(rates) == 1 else padded_lengths(spec.tensor_lengths, spec.n)[1].tolist()
        if len(rates) != len(lengths):
            raise ValueError(f"vector {spec.vector_id} has {len(lengths)} tensors, but rates has {len(rates)} for it")
        layout = lay_out(lengths, rates, *self.chunks)
        about = layout, self.beta, spec.dtype, self.local_momentum
        memory = Memory(space_at(spec.device), spec.n, spec.compute, spec.stored, *about)
        reducer = SharedIndexMean(comm, spec, self.chooser(comm, spec, memory))
        dense = FullPrecisionMean(comm, spec) if self.warmup_steps else None
        return Parts(memory, reducer, dense)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        # the steps after the warm-up, at `rate`
        chunk, exact = self.chunks
        chunk = max(1, n) if exact else chunk or self.rate
        return shared_model(n, dtype, ranks, piece_bytes, chunk, -(-chunk // self.rate), self.index_bits(chunk))

    def index_bits(self, chunk: int) -> int:
        """Return the bits that are sent of the place of an element within its chunk."""
        return index_bits(chunk)
