"""Marsit's feedback: the residual, and the votes of vector and residual.

One pass over memory adds the residual, takes signs, packs them, leaves the new residual and sums magnitudes; another
unpacks merged signs into the result. With rule "paper" the subtraction of a result waits until the next encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from collectives.annotations import AnyArray, Array, Doubles, FloatArray, Indices, Testable, override
from collectives.arrays import Device, after_copy
from collectives.arrays.elements import SIXTEEN_BIT
from mpicomp import kernels
from mpicomp.feedback.base import (
    Feedback,
    FiniteFlag,
    Problem,
    State,
    StateKind,
    StepInput,
    bad_ranks,
    compute_type,
    copy_to_host,
    overwrite,
    words_of,
)
from mpicomp.feedback.scale_groups import Run, ScaleGroups, why
from mpicomp.feedback.sign_blocks import SignBlocks
from mpicomp.feedback.step_size import SignRule, StepSize

STREAMING_ELEMENTS = 4 << 20  # results this long are written past the caches
SAMPLE = 1 << 16
Tensors = Sequence[tuple[FloatArray, FloatArray]]
"""Pairs of vectors: before and after a local update."""


class SignPart(NamedTuple):
    """A run of elements that share a scale, and where its bits, sums and residual are; `within` its tensor."""

    elements: slice
    within: slice
    tensor: int
    bits: Array
    second: Array | None
    sums: Array
    residual: Array | None


class SignResidual(Feedback):
    """Residual and step size of one vector.

    The residual is written in place while signs are encoded: a second buffer would take a third of the memory of a
    step. So a step that fails spoils it, unless the rule is transactional and a copy is kept.

    Parameters
    ----------
    device : Device
    rule : SignRule
    n, dtype, ranks : int, str, int
        Elements, their type, and the number of ranks.
    lengths, padded : int64[tensors]
        Elements of each tensor, and the elements that it takes up.
    pieces : sequence of range
        Of the reducer.
    bits : uint64[ceil(n / 64)]
        The reducer's; a tensor on the device where the reducer's signs stay there.
    second : like bits, optional
        Second votes.

    Attributes
    ----------
    size : StepSize
    skipped : int
        Steps skipped because a rank had NaN or infinity.
    packed : bool
        The step's result is left in the bits, and `out` is left alone.
    spoiled : bool
        A failed step has overwritten a part of the residual.
    """

    state_nan: ClassVar[str] = "magnitudes"  # of tensors not seen yet
    reports_when = "beside"

    def __init__(
        self,
        device: Device,
        rule: SignRule,
        n: int,
        dtype: str,
        ranks: int,
        lengths: Indices,
        padded: Indices,
        pieces: Sequence[range],
        bits: Array,
        second: Array | None = None,
    ) -> None:
        super().__init__(device, {})
        self.rule, self.size, self.n_reports = rule, StepSize(rule, dtype, ranks, lengths), 1 + lengths.size
        self._n, self._dtype, self._lengths = n, dtype, lengths
        self._narrow, kind = dtype in SIXTEEN_BIT, compute_type(dtype)
        self._compute, self._words = np.dtype(kind), self.size.positive.dtype
        self._constants = kind(0), np.nextafter(kind(0), kind(1))
        self._vector_residual: Array | None = None if rule.residual is None else device.zeros(n, self._compute.name)
        self._lazy, self._stateless = rule.residual == "paper", rule.residual is None and rule.global_step != "auto"
        self._pending = np.zeros(lengths.size, kind)  # s of the result not yet subtracted ("paper")
        self._before: tuple[Array | None, Doubles, float] | None = None  # of a step under way
        self._kept: tuple[Array | None, Doubles, float] | None = None  # of the last step, if it was transactional
        self._spare = (
            device.zeros(n, self._compute.name)
            if rule.transactional and rule.residual is not None and not self.on_host
            else None
        )
        self._automatic, self.skipped = rule.global_step == "auto", 0
        self.packed = self.spoiled = False
        self._odd_positive = self._streaming = self._encoding = False
        self._nothing: Array = np.empty(0, kind)
        self._out: Array = self._nothing
        self._source: StepInput | None = None
        self._tensors: Tensors | None = None
        self._difference: Any = None
        self._finite = FiniteFlag(device)
        self._lay_out(pieces, padded, bits, second)
        self.end()

    def _lay_out(self, pieces: Sequence[range], padded: Indices, bits: Array, second: Array | None) -> None:
        groups = ScaleGroups.of(padded.tolist(), self._n)
        self._firsts, self._pairs, self._host_bits = groups.firsts, second is not None, bits
        self._sums = np.zeros(groups.blocks)  # of |u|, block by block
        self._clipped = [0] * len(pieces)  # elements of each piece; the sum of a list takes a tenth of an array's time
        self._blocks = (
            None if self.on_host else SignBlocks(self.device, groups, pieces, bits, second, not self._stateless)
        )

        def part(run: Run) -> SignPart:
            own = bits[run.words()], None if second is None else second[run.words()]
            first, length = int(groups.starts[run.group]), int(self._lengths[run.group])
            within = slice(run.elements.start - first, min(run.elements.stop - first, length))
            kept = None if self._vector_residual is None else self._vector_residual[run.elements]
            return SignPart(run.elements, within, run.group, *own, self._sums[run.sums], kept)

        self._parts = [[part(run) for run in runs] for runs in groups.runs(pieces)] if self.on_host else []

    # One step --------------------------------------------------------------------------------------------------------

    @override
    def check_ready(self) -> None:
        if self.spoiled:
            raise RuntimeError(
                "an earlier step met NaN or infinity, or was cut off, and its residual is spoiled: restore it by "
                "load_state_dict, or start() anew"
            )

    @override
    def begin(self, call: StepInput) -> None:
        self._source, self._odd_positive = call, call.step % 2 == 0
        difference = self._difference = None if call.is_taken else call.difference
        # as long as the vector is two sets of tensors nobody computes it, and the result is left packed if possible
        self._tensors, self.packed = None, False
        if difference is not None and self._vector_residual is not None:
            self._tensors = difference.flat_tensors()
            self.packed = self._tensors is not None and not self._pairs
        if self.on_host:
            self._out, self._clipped = call.out.view(self._words), [0] * len(self._parts)
            self._streaming = self._n >= STREAMING_ELEMENTS and call.out.ctypes.data % 32 == 0
        else:
            self._out = words_of(self.device, call.out)
        if self._tensors is None:
            self._vector()  # before several threads ask for it
        self._kept = None  # before another copy is made
        if self.rule.transactional or call.compare is not None:
            self._before = self._settled(self._spare), self.size.magnitudes.copy(), self.size.gamma

    @override
    def end(self) -> None:
        self._out = self._nothing
        self._source = self._tensors = self._before = self._difference = None
        self._encoding = False

    def _vector(self) -> Array:
        """Return the vector as a whole."""
        assert self._source is not None
        self._tensors = None  # the vector may take their memory
        return self._source.values

    @override
    def commit(self) -> None:
        self._kept = self._before if self.rule.transactional else None
        self.end()

    @override
    def roll_back(self) -> None:
        """Go back to the state before the step if it was kept; else the residual is spoiled."""
        compares = self._source is not None and self._source.compare is not None
        if self._before is not None and (self.rule.transactional or compares):
            self._restore(self._before)
        elif self._encoding:
            self.spoiled = self._vector_residual is not None
        self.end()

    def _restore(self, before: tuple[Array | None, Doubles, float]) -> None:
        residual, self.size.magnitudes, self.size.gamma = before
        if residual is not None:
            overwrite(self.device, self._vector_residual, residual)
        self._pending[:] = 0
        self.spoiled = False

    @property
    @override
    def can_undo(self) -> bool:
        return self._kept is not None

    @override
    def undo(self) -> None:
        assert self._kept is not None
        self._restore(self._kept)
        self._kept = None

    @override
    def encode(self, piece: int) -> Testable | None:
        self._encoding = True
        if self._blocks is not None:
            return self._blocks.encode(piece, self._vector(), self._vector_residual, self._lazy, self._odd_positive)
        (zero, tiny), encode, size = self._constants, self.kernels.sign.encode, self.size
        tensors, whole = self._tensors, None
        vector = self._vector() if tensors is None else self._nothing
        for part in self._parts[piece]:
            u, tensor = vector[part.elements], part.tensor
            if tensors is not None:
                before, after = tensors[tensor]
                whole, u = before[part.within], after[part.within]
            if self._stateless:
                finite = self.kernels.sign.pack(u, part.bits, self._odd_positive, zero, tiny)
                part.sums[:] = 0.0 if finite else np.nan
                continue
            previous = self._pending[tensor] if self._lazy else None
            terms = u, whole, part.residual, part.bits, size.steps[tensor], size.limits[tensor], previous
            self._clipped[piece] += encode(*terms, self._odd_positive, zero, tiny, part.sums)
        return None

    @override
    def decode(self, piece: int) -> Testable | None:
        """Write the result of a piece from its merged signs, unless they are to be kept packed."""
        if self.packed:
            return None
        if self._blocks is not None:
            return self._blocks.decode(piece, self._out)
        positive, negative = self.size.positive, self.size.negative
        for part in self._parts[piece]:
            plus, minus, out = positive[part.tensor], negative[part.tensor], self._out[part.elements]
            if part.second is None:
                self.kernels.sign.unpack(part.bits, plus, minus, self._streaming, out)
            else:
                unpack_pair, nothing = self.kernels.shared_selection.unpack_pair, positive.dtype.type(0)
                unpack_pair(part.bits, part.second, plus, nothing, minus, self._streaming, out)
        return None

    def _every_part(self) -> Iterator[SignPart]:
        return chain.from_iterable(self._parts)

    @override
    def settle(self, call: StepInput) -> None:
        """Have the result subtracted later (rule "paper"), and let gamma follow the clipped fraction."""
        if self._lazy:
            self._pending[:] = self.size.steps
        self.size.adapt()
        if self._difference is not None and self.packed:
            self._difference.keep_packed(self.subtract_result)

    def subtract_result(self, tensors: Sequence[FloatArray]) -> None:
        """Subtract the last result, which was left packed, from flat tensors."""
        subtract = self.kernels.sign.subtract_result
        for part in self._every_part():
            subtract(tensors[part.tensor][part.within], part.bits, self.size.steps[part.tensor])

    # Reports of the ranks --------------------------------------------------------------------------------------------

    @override
    def reports_first(self, step: int) -> bool:
        return self._automatic and self.size.is_unknown

    @override
    def measure(self) -> Testable | None:
        vector = self._vector()
        if self._blocks is not None:
            return self._blocks.add_and_clear(vector, None, False, None)
        for part in self._every_part():
            self.kernels.sign.add_and_clear(vector[part.elements], None, part.bits, None, None, part.sums)
        return None

    @override
    def report(self, row: Doubles) -> None:
        """Write the clipped elements, then the sum of |u| of each tensor."""
        sums, clipped = self._sums, sum(self._clipped)
        if self._blocks is not None:
            sums, clipped = self._blocks.reports()
        if not kernels.of("cpu").sign.add_up(sums, self._firsts, clipped, row):
            row[:] = why(self.all_finite(self._vector()))

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        if self.size.follow(reports):
            return None
        return Problem(bad_ranks(np.isnan(reports).any(axis=1)))

    @override
    def fix_scales(self) -> Problem | None:
        if self.size.fix():
            if self._blocks is not None:
                self._blocks.send_scales(self.size, self._pending)
            return None
        self.size.magnitudes[:] = np.nan  # the next step measures again, or it would meet the same mean for ever
        if self._before is not None:
            self._before[1][:] = np.nan
        return Problem(quantity="the global step")

    # Full-precision rounds -------------------------------------------------------------------------------------------

    def add_and_clear(self, total: Array) -> Testable | None:
        """Overwrite `total`, the caller's result or a widened vector, with vector + residual; clear the residual."""
        self._encoding = True
        vector = self._vector()
        copied = None
        if self._blocks is not None:
            if self._lazy:
                self._blocks.send_scales(self.size, self._pending)
            copied = self._blocks.add_and_clear(vector, self._vector_residual, self._lazy, total)
        for part in self._every_part():
            previous = self._pending[part.tensor] if self._lazy else None
            u, sums = vector[part.elements], total[part.elements]
            self.kernels.sign.add_and_clear(u, part.residual, part.bits, previous, sums, part.sums)
        self._pending[:] = 0
        return copied

    def clear(self, out: Array) -> Testable | None:
        """Overwrite a result with zeros."""
        self.launch(partial(out.fill, 0) if self.on_host else out.zero_)
        return self.device.done()

    def look(self, values: Array, found: Any) -> Testable | None:
        """Write to ``found[0]`` whether a vector has NaN or infinity; it is there once the handle completes."""
        if self.on_host:
            found[0] = not self.all_finite(values)
            return None
        flag = self._finite
        flag.reset()
        self.launch(flag.check, self.kernels.sign.all_finite, values)
        return after_copy(flag.fetch(), lambda: found.__setitem__(0, not flag))

    # State -----------------------------------------------------------------------------------------------------------

    @property
    @override
    def residual(self) -> Array | None:
        """The residual; with rule "paper" the last result may still be to be subtracted."""
        return self._vector_residual

    @property
    def clipped_fraction(self) -> float:
        """Fraction of the residual's elements, over all ranks, that was clipped at the last step."""
        return self.size.clipped_fraction

    @property
    def gamma(self) -> float:
        """Factor between the mean magnitude and an automatic step."""
        return self.size.gamma

    def swing(self) -> float:
        """Return the mean magnitude of a sample of the settled residual, in global steps; rule "paper"."""
        assert self._vector_residual is not None
        sample, step = copy_to_host(self.device, self._vector_residual[: self._sample()]), self._pending[0]
        kernels.of("cpu").sign.subtract_result(sample, self._host_bits, step)
        return float(np.abs(sample).mean() / step) if step else 0.0

    def _sample(self) -> int:
        return min(SAMPLE, int(self._lengths[0]))

    def settled_residual(self) -> AnyArray | None:
        """Return a copy, on the host, of the residual with no result left to be subtracted."""
        settled = self._settled()
        return None if settled is None else settled if self.on_host else copy_to_host(self.device, settled)

    def _settled(self, into: Array | None = None) -> Array | None:
        """Return such a copy where vectors are; on a device `into` is overwritten with it, if it is given."""
        if self._vector_residual is None:
            return None
        if self.on_host:
            settled = np.array(self._vector_residual)
        else:
            settled = self.device.zeros(self._n, self._compute.name) if into is None else into
            overwrite(self.device, settled, self._vector_residual)
        if self._lazy:
            if self._blocks is not None:
                self._blocks.send_scales(self.size, self._pending)
                self._blocks.subtract_pending(settled)
            for part in self._every_part():
                pending = self._pending[part.tensor]
                self.kernels.sign.subtract_result(settled[part.elements], part.bits, pending)
        return settled

    @property
    @override
    def state_kinds(self) -> dict[str, StateKind]:
        return {"gamma": "shared", "magnitudes": "shared", "residual": "mean"}

    @override
    def state(self) -> State:
        settled = self.settled_residual()
        residual = {} if settled is None else {"residual": settled}
        return {"gamma": self.size.gamma, "magnitudes": self.size.magnitudes.copy(), **residual}  # type: ignore[dict-item]

    @override
    def like(self) -> State:
        like: State = {"gamma": np.zeros(()), "magnitudes": self.size.magnitudes}
        if self._vector_residual is not None:
            like["residual"] = np.broadcast_to(np.zeros((), self._compute), (self._n,))
        return like

    @override
    def load(self, state: State) -> str:
        if self._vector_residual is not None:
            overwrite(self.device, self._vector_residual, state["residual"])
        self._pending[:] = 0
        self.spoiled = False
        return self.size.load(state)
