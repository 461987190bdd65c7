"""EF21 with momentum (EF21-SGDM): each rank sends changes of its averaged gradient, not gradients.

    v_m <- v_m + eta (g_m - v_m)
    c_m  = C(v_m - h_m);   h_m <- h_m + c_m
    h   <- h + mean_m c_m;   result = h

g_m is this rank's vector, v_m its momentum, h_m the estimate of v_m that all ranks have, and h the mean of all h_m.
The residual v_m - h_m is a distance, not a sum of old errors: ranks whose data differ do not pile up errors that cancel
in the mean. eta = 1 is EF21 without momentum.

In the first step all ranks send v_m = g_m in full: h_m = v_m, and h is their mean. So do other ranks that go on.

With `both_ways` the owners of parts of the vector send C(d + mean_m c_m) and keep the rest as d; h changes by the sent
values (EF21-BC). So d + h is the mean of all h_m.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from collectives import Communicator
from collectives.annotations import Array, override
from collectives.arrays import HOST_DEVICE
from collectives.progress.polling import done
from mpicomp import kernels
from mpicomp.aggregator.algorithm import Driver, Parts, VectorSpec
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Round
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.aggregator.step import StepDriver
from mpicomp.codecs.base import Codec
from mpicomp.codecs.options import flag, integer, number, require
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.codecs.random_sparsification import RandomSparsification
from mpicomp.codecs.registry import compressor
from mpicomp.codecs.scaled_sign import OneBit
from mpicomp.codecs.ternary import Ternary
from mpicomp.codecs.top_k import TopK
from mpicomp.feedback.base import Residual, State, StepInput, overwrite
from mpicomp.feedback.codes import Codes, GatheredCodes, OwnedCodes
from mpicomp.feedback.error_feedback import ErrorFeedback, ErrorRule
from mpicomp.feedback.payloads import Decode
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.all_gather import all_gather
from mpicomp.reducers.families import CodingMethod
from mpicomp.reducers.full_precision_mean import FullPrecisionMean
from mpicomp.reducers.two_pass import owned_codes

_DEFAULT = TopK(100)


def contracts(codec: Codec) -> bool:
    """Return False for a codec of ours whose error may be longer than its input, see mpicomp help error-feedback."""
    if isinstance(codec, OneBit):
        return codec.scale == "l1"
    if isinstance(codec, Ternary):
        return codec.bucket <= 48
    if isinstance(codec, Quantizer):
        most = codec.levels**2 * (8 if codec.norm == "linf" else 4)
        return codec.bucket <= most if codec.norm == "linf" else codec.bucket < most
    return not isinstance(codec, RandomSparsification) or codec.p > 0.5


@method(
    "ef21",
    Learned(Grade.COMPARED, "ended behind double-squeeze in the one small problem that was tried"),
    forms=({}, {"compressor": "one-bit:scale=l1", "both_ways": True}),
)
@dataclass(frozen=True)
class EF21(CodingMethod):
    """Options of EF21 with momentum: each rank sends changes of its averaged gradient, for ranks whose data differ.

    The result is an average over past steps, so the optimizer behind it needs no momentum of its own.

    Parameters
    ----------
    compressor : Codec or str
        Codec of the changes: one of `mpicomp.codecs`, or its name and options as in ``"top-k:rate=50"``. Its error must
        be shorter than its input.
    eta : float
        Weight of this step's gradient in the momentum, above 0 and at most 1: 0.1 is momentum 0.9, 1 is no momentum.
    both_ways : bool
        True: owners of parts of the vector send codes of the mean, so the traffic does not grow with the ranks. False:
        the codes of all ranks are gathered.
    seed : int
        Seed of codecs that draw; equal on all ranks.

    Raises
    ------
    ValueError
        There is no such compressor, its error may be longer than its input, or an option is out of range.

    References
    ----------
    Fatkhullin, Tyurin, Richtarik, "Momentum provably improves error feedback!", NeurIPS 2023 (arXiv 2305.15155),
    Algorithm 1; both ways: Fatkhullin et al., "EF21 with bells & whistles" (arXiv 2110.03294).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def train(comm):
    ...     ef21 = mpicomp.EF21("top-k:rate=2", eta=1.0).start(comm, 2)
    ...     gradients = [4.0 * comm.rank, 2.0], [4.0 * comm.rank, 3.0]  # ranks differ in the first element
    ...     return [ef21.aggregate(np.array(gradient, np.float32)).tolist() for gradient in gradients]
    >>> mpicomp.run_local(2, train)[0]  # the change of the second element is sent, and the first one stays right
    [[2.0, 2.0], [2.0, 3.0]]
    """

    compressor: Codec | str = _DEFAULT
    eta: float = 0.1
    both_ways: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        codec = compressor(self.compressor)
        wanted = "a codec whose error is shorter than its input, such as top-k, one-bit:scale=l1 or levels"
        require(contracts(codec), "compressor", wanted, codec)
        object.__setattr__(self, "compressor", codec)
        number(self, "eta", "above 0 and at most 1", lambda eta: 0 < eta <= 1)
        flag(self, "both_ways")
        integer(self, "seed")

    @property
    @override
    def estimates_mean(self) -> bool:
        return False  # the result is an average over past steps

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> Codec:
        return compressor(self.compressor)

    @override
    def codec_back(self, dtype: str) -> Codec | None:
        return compressor(self.compressor) if self.both_ways else None

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Changes of estimates x compressor x all-gather or two passes, and a mean in full precision."""
        codec, about = compressor(self.compressor), (spec, self.eta, comm.size)
        if self.both_ways:
            streams = tuple(Stream(self.seed, spec.vector_id, f"code of {who}") for who in ("worker", "owner"))
            rules, keys = (_Change(), ErrorFeedback()), ("estimate", "owner_distance")
            made = owned_codes(comm, spec, codec, codec, *rules, streams, keys, feedback=partial(_Owned, about=about))
        else:
            made = all_gather(comm, spec, codec, _Change(), self.seed, partial(_Gathered, about=about))
        return made._replace(dense=_FullMean(comm, spec, made.feedback))

    @override
    def assemble(self, comm: Communicator, spec: VectorSpec) -> tuple[Parts, Driver]:
        parts = self.parts(comm, spec)
        return parts, StepDriver(comm, parts, parts.feedback.begins)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Change(ErrorRule):
    """Rule p = v - h; h <- h + Q(p)."""

    @override
    def compensate(self, values: Array, residual: Array, out: Array) -> None:
        kernels.beside(out).arrays.keep(values, residual, residual, None, out)

    @override
    def keep(self, values: Array, compensated: Array, sent: Array, residual: Array, out: Array) -> Any:
        on = kernels.beside(out)
        on.arrays.compensate(sent, residual, None, out)
        return on.sign.all_finite(out)


class _Estimates(Codes):
    """Momentum of this rank, the estimate that all ranks have of it, and the mean of all ranks' estimates."""

    def __init__(self, *arguments: Any, about: tuple[VectorSpec, float, int]) -> None:
        super().__init__(*arguments)
        spec, eta, self._size = about
        kind, n = spec.compute.type, spec.n
        self._eta, self._estimate = None if eta == 1 else kind(eta), self._mine.residual
        self._momentum = Residual(self.device, n, kind, pending=False)
        self._common = Residual(self.device, n, kind, "shared")
        self._known_by = Residual(HOST_DEVICE, 1, "int64", "shared")  # those that have sent momenta in full, or 0
        owners = {key: one for key, one in self.residuals.items() if one.kind == "owner"}
        for one in (self._estimate, *owners.values()):
            one.is_pending = False  # a dense step, or another rank, must not contribute it
        own = {"estimate": self._estimate, "momentum": self._momentum}
        self.residuals = {**own, "common": self._common, "ranks": self._known_by, **owners}

    def begins(self, step: int) -> bool:
        """Return True if the ranks send their momenta in full: others than these, or none, have done so."""
        return int(self._known_by.current[0]) != self._size

    @property
    @override
    def residual(self) -> Array:
        return self._momentum.current - self._estimate.current

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._known_by.following[:] = self._size

    def _average(self, part: slice) -> Array:
        """Return a part of the new momentum."""
        g, old, out = self._values[part], self._momentum.current[part], self._momentum.following[part]
        if self._eta is None:
            overwrite(self.device, out, g)
        else:
            self.launch(self.kernels.arrays.keep, g, old, old, None, out)
            self.launch(self.kernels.arrays.compensate, old, out, self._eta, out)
        return out

    @override
    def _part(self, cut: range) -> Array:
        return self._average(slice(cut.start, cut.stop))

    @override
    def _mean_of(self, piece: int) -> Decode:
        cut, change = self._cuts[piece], super()._mean_of(piece)  # type: ignore[safe-super]  # a subclass has it
        part = slice(cut.start, cut.stop)

        def add(out: Array, scratch: Array) -> None:
            change(out, scratch)
            kernels.beside(out).arrays.compensate(out, self._common.current[part], None, self._common.following[part])
            out[:] = self._common.following[part]

        return add

    def restart(self, call: StepInput) -> tuple[Array, Array]:
        """Begin a step in full: return the new momentum, and memory for the mean of all ranks'."""
        self.begin(call)
        if self._known_by.current[0]:
            self._average(slice(None))
        else:
            overwrite(self.device, self._momentum.following, self._values)
        overwrite(self.device, self._estimate.following, self._momentum.following)
        for one in self.residuals.values():
            if one.kind == "owner":
                one.following[:] = 0
        return self._momentum.following, self._common.following

    def spread(self) -> Iterator[Any]:
        """Write the mean to the result, piece by piece; yields a handle of each."""
        for cut in self._cuts:
            part = self._common.following[cut.start : cut.stop]
            yield self._results.write(cut, partial(_copy, part))

    @property
    def is_finite(self) -> bool:
        """True if the result is finite."""
        return bool(self._results.finite)

    @override
    def load(self, state: State) -> str:
        ranks = int(state["ranks"][0])
        common = hashlib.blake2b(state["common"].tobytes(), digest_size=8).hexdigest()
        return f"{super().load(state)}mean of estimates {common} of {ranks} ranks"


def _copy(part: Array, out: Array, scratch: Array) -> None:
    out[:] = part


class _Gathered(_Estimates, GatheredCodes):
    """Codes of all ranks are gathered."""


class _Owned(_Estimates, OwnedCodes):
    """Owners send codes of the mean, and keep their error."""


class _FullMean(FullPrecisionMean):
    """Reducer of steps in which all ranks send their momenta in full, in the type that they are kept in."""

    def __init__(self, comm: Communicator, spec: VectorSpec, estimates: Any) -> None:
        super().__init__(comm, replace(spec, dtype=spec.compute.name))
        self._estimates: _Estimates = estimates

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        yield from self.mean.steps(call, *self._estimates.restart(call))
        for written in self._estimates.spread():
            yield from done(call, written)
        if not self._estimates.is_finite:
            yield from self.reject(call, not (yield from self.mean.all_finite(call, call.values)))
