"""Marsit's feedback: the residual, and the votes of vector and residual.

One pass over memory adds the residual, takes signs, packs them, leaves the new residual and sums magnitudes; another
unpacks merged signs into the result. With rule "paper" the subtraction of a result waits until the next encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from collectives.annotations import AnyArray, Array, Doubles, Indices, Testable, override
from collectives.arrays import after_copy
from mpicomp import kernels
from mpicomp.feedback.base import Feedback, Problem, State, StateKind, StepInput, bad_ranks, compute_type
from mpicomp.feedback.host_signs import HostSigns, Tensors
from mpicomp.feedback.in_place_residual import InPlaceResidual
from mpicomp.feedback.packed_signs import PackedSigns
from mpicomp.feedback.scale_groups import ScaleGroups, why
from mpicomp.feedback.sign_blocks import SignBlocks
from mpicomp.feedback.step_size import SignRule, Snapshot, StepSize
from mpicomp.spaces import DeviceSpace, Space

SAMPLE = 1 << 16


class SignResidual(Feedback):
    """Marsit's half of a step: a residual, a step size, and signs.

    Parameters
    ----------
    space : Space
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
    in_place : InPlaceResidual or None
    """

    state_nan: ClassVar[str] = "magnitudes"  # of tensors not seen yet
    reports_when = "beside"

    def __init__(
        self,
        space: Space,
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
        super().__init__(space, {})
        self.size, self.n_reports, self._bits = StepSize(rule, dtype, ranks, lengths), 1 + lengths.size, bits
        residual: InPlaceResidual | None = None
        if rule.residual is not None:
            lazy, keeps = rule.residual == "paper", rule.transactional
            residual = InPlaceResidual(space, n, compute_type(dtype), lengths.size, lazy=lazy, keeps=keeps)
        self.in_place = residual
        self._before: Snapshot | None = None  # of a step under way
        self._kept: Snapshot | None = None  # of the last step, if it was transactional
        self.skipped, self._has_pairs = 0, second is not None
        self.packed = self._encoding = False
        self._has_scales = False  # of the step under way; False once those of the next step take their place
        self._out = self._nothing = self.size.steps[:0]
        self._source: StepInput | None = None
        self._tensors: Tensors | None = None
        self._difference: Any = None
        self._finite = space.flag()
        groups = ScaleGroups.of(padded.tolist(), n)
        self._firsts = groups.firsts
        scales = self.size, residual, residual is not None or rule.global_step == "auto"
        self._signs: HostSigns | SignBlocks
        if not isinstance(space, DeviceSpace):
            self._signs = HostSigns(groups, pieces, lengths, bits, second, *scales)
        else:
            self._signs = SignBlocks(space, groups, pieces, bits, second, *scales)
            self.decodes_with_reports = self._signs.looks_ahead
        self.end()

    # One step --------------------------------------------------------------------------------------------------------

    @override
    def why_unusable(self) -> str:
        if self.in_place is None or not self.in_place.spoiled:
            return ""
        return (
            "an earlier step met NaN or infinity, or was cut off, and its residual is spoiled: restore it by "
            "load_state_dict, or start() anew"
        )

    @override
    def reads_pieces(self, step: int) -> bool:
        return self.space.is_host and not self.reports_first(step)

    @override
    def begin(self, call: StepInput) -> None:
        self._source = call
        difference = self._difference = None if call.is_taken else call.difference
        # as long as the vector is two sets of tensors nobody computes it, and the result is left packed if possible
        self._tensors, self.packed = None, False
        if difference is not None and self.in_place is not None:
            self._tensors = difference.flat_tensors()
            self.packed = self._tensors is not None and difference.may_stay_packed and not self._has_pairs
        self._out = self.space.words(call.out)
        if self._tensors is None and call.read is None:
            self._vector()  # before several threads need it
        self._kept = None  # the second buffer is overwritten
        keeps = self.size.rule.transactional or call.compare is not None
        if self.in_place is not None:
            self.in_place.begin(keeps, self._signs.subtract_pending)
        self._signs.begin(self._out)
        if keeps or call.read is not None:
            self._before = self.size.snapshot()

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
        self._kept = self._before if self.size.rule.transactional else None
        if self.in_place is not None and self._encoding:
            self.in_place.commit()
        self.end()

    @override
    def roll_back(self) -> None:
        """Go back to the state before the step if it was kept; else the residual is spoiled."""
        before, call = self._before, self._source
        compares = call is not None and call.compare is not None
        keeps = self.size.rule.transactional or compares
        # the scales also where another shard of the vector has failed after this one had adopted its reports
        if before is not None and (keeps or (call is not None and call.read is not None)):
            self.size.restore(before)
        if self.in_place is not None and before is not None and keeps:
            self.in_place.roll_back()
        elif self.in_place is not None and self._encoding:
            self.in_place.spoiled = True
        self.end()

    @property
    @override
    def can_undo(self) -> bool:
        return self._kept is not None

    @override
    def undo(self) -> None:
        assert self._kept is not None
        self.size.restore(self._kept)
        if self.in_place is not None:
            self.in_place.undo()
        self._kept = None

    @override
    def encode(self, piece: int) -> Testable | None:
        assert self._source is not None
        self._encoding, tensors, odd_positive = True, self._tensors, self._source.step % 2 == 0
        if self._source.read is not None:
            assert isinstance(self._signs, HostSigns)
            elements = self._signs.pieces[piece]
            self._signs.encode(piece, self._source.read(elements), odd_positive, None, first=elements.start)
            return None
        vector = self._vector() if tensors is None else self._nothing
        return self._signs.encode(piece, vector, odd_positive, tensors)

    @override
    def decode(self, piece: int) -> Testable | None:
        """Write the result of a piece from its merged signs, unless they are to be kept packed."""
        if self.decodes_with_reports:
            assert isinstance(self._signs, SignBlocks)
            self._end_scales()
            self._signs.look_ahead(self.size.fix)
        return None if self.packed else self._signs.decode(piece, self._out)

    def _end_scales(self) -> None:
        """Have the result subtracted later (rule "paper"), and let gamma follow the clipped fraction."""
        if self.in_place is not None and self.in_place.lazy:
            self.in_place.pending[:] = self.size.steps
        self.size.adapt()
        self._has_scales = False

    @override
    def end_decoding(self, call: StepInput) -> None:
        if self._has_scales:
            self._end_scales()
        if self._difference is not None and self.packed:
            assert isinstance(self._signs, HostSigns)
            self._difference.keep_packed(self._signs.subtract_from)
        if call.accepts_packed and not self._has_pairs:  # besides the result in `out`
            call.packed = PackedSigns(self._bits, self.size.positive, self.size.negative)

    # Reports of the ranks --------------------------------------------------------------------------------------------

    @override
    def reports_first(self, step: int) -> bool:
        return self.size.is_unknown

    @override
    def measure(self) -> Testable | None:
        return self._signs.measure(self._vector())

    @override
    def report(self, row: Doubles) -> None:
        """Write the clipped elements, then the sum of |u| of each tensor."""
        sums, clipped = self._signs.reports()
        if not kernels.of("cpu").sign_steps.add_up(sums, self._firsts, clipped, row):
            row[:] = why(self.all_finite(self._vector()))

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        if self.size.follow(reports):
            return None
        return Problem(bad_ranks(np.isnan(reports).any(axis=1)))

    @override
    def fix_scales(self) -> Problem | None:
        if self.size.fix():
            self._has_scales = True
            self._signs.send_scales()
            return None
        self.size.magnitudes[:] = np.nan  # the next step measures again, or it would meet the same mean for ever
        if self._before is not None:
            self._before.magnitudes[:] = np.nan
        return Problem(quantity="the global step")

    # Full-precision rounds -------------------------------------------------------------------------------------------

    def add_and_clear(self, total: Array) -> Testable | None:
        """Overwrite `total`, the caller's result or a widened vector, with vector + residual; clear the residual."""
        self._encoding = True
        copied = self._signs.add_and_clear(self._vector(), total)
        if self.in_place is not None:
            self.in_place.pending[:] = 0
        return copied

    def clear(self, out: Array) -> Testable | None:
        """Overwrite a result with zeros."""
        self.launch(out.fill if self.space.is_host else out.fill_, 0)
        return self.space.done()

    def look(self, values: Array, found: Any) -> Testable | None:
        """Write to ``found[0]`` whether a vector has NaN or infinity; it is there once the handle completes."""
        flag = self._finite
        flag.reset()
        self.launch(flag.check, self.kernels.sign.all_finite, values)
        return after_copy(flag.fetch(), lambda: found.__setitem__(0, not flag))

    # State -----------------------------------------------------------------------------------------------------------

    @property
    @override
    def residual(self) -> Array | None:
        """The residual; with rule "paper" the last result may still be to be subtracted."""
        return None if self.in_place is None else self.in_place.current

    @property
    def clipped_fraction(self) -> float:
        """Fraction of the residual's elements, over all ranks, that was clipped at the last step."""
        return self.size.clipped_fraction

    def swing(self) -> float:
        """Return the mean magnitude of a sample of the residual that a step leaves, in global steps; rule "paper"."""
        assert self.in_place is not None
        count = min(SAMPLE, int(self.size.lengths[0]))
        sample, step = self.space.saved(self.in_place.following[:count]), self.in_place.pending[0]
        bits = self._bits
        if not isinstance(bits, np.ndarray):
            bits = self.space.saved(bits[: -(-sample.size // 64)]).view(np.uint64)
        kernels.of("cpu").sign.subtract_result(sample, bits, step)
        return float(np.abs(sample).mean() / step) if step else 0.0

    def copy_settled_residual(self) -> AnyArray | None:
        """Return a copy, on the host, of the residual with no result left to be subtracted."""
        return None if self.in_place is None else self.in_place.copy_settled(self._signs.subtract_pending)

    @property
    @override
    def state_kinds(self) -> dict[str, StateKind]:
        return {"gamma": "shared", "magnitudes": "shared", "residual": "mean"}

    @override
    def state(self) -> State:
        settled = self.copy_settled_residual()
        residual = {} if settled is None else {"residual": settled}
        return {"gamma": self.size.gamma, "magnitudes": self.size.magnitudes.copy(), **residual}  # type: ignore[dict-item]

    @override
    def like(self) -> State:
        like: State = {"gamma": np.zeros(()), "magnitudes": self.size.magnitudes}
        if self.in_place is not None:
            like["residual"] = self.in_place.like
        return like

    @override
    def load(self, state: State) -> str:
        if self.in_place is not None:
            self.in_place.restore(state["residual"])
        return self.size.load(state)
