"""Contract of feedback, and the double-buffered vectors that it carries from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray, Array, Bytes, Doubles, FloatArray, Testable, override
from collectives.arrays import Device
from mpicomp import kernels
from mpicomp.feedback.packed_signs import PackedSigns
from mpicomp.feedback.rounds import Round
from mpicomp.spaces import HOST, Space, space_of

State = dict[str, AnyArray]
StateKind = Literal["mean", "owner", "owned", "shared", "shard"]
"""Meaning of a state's entry where other ranks continue with it, see `mpicomp.state.redistribute`: a float array
whose mean over ranks is pending; an array[n] that is zero except for the elements that the rank owns; start and stop of
these elements; an entry that is equal on all ranks."""

BY_ELEMENT: tuple[StateKind, ...] = ("mean", "owner")
"""Kinds of entries with a number for each element, unless an option leaves out their elements."""


class StepInput(Protocol):
    """One rank's vector in a step, and the array that takes the result.

    Attributes
    ----------
    step : int
    values : float32[n] or float64[n]
        Left alone. A tensor where a device encodes, like `out` and `wide`.
    out : array[n]
        Overwritten with the result; uint16 for bfloat16.
    wide : float32[n] or None
        For 16-bit vectors: the same memory as `values`, and may be overwritten.
    difference : Difference or None
        Two sets of tensors whose difference is the vector, see `mpicomp.aggregator.difference`.
    is_taken : bool
        The vector has been computed; the tensors of `difference` may be gone.
    compare : object or None
        Not None as long as the ranks have yet to compare the call.
    read : callable or None
        ``read(elements)`` returns a piece of the vector, where `Feedback.reads_pieces`.
    accepts_packed : bool
        The result may be left in `packed` besides `out`.
    """

    step: int
    out: Array
    wide: Array | None
    difference: Any
    compare: Any
    read: Callable[[range], FloatArray] | None
    accepts_packed: bool
    packed: PackedSigns | None

    @property
    def is_taken(self) -> bool:
        """See the attributes."""
        ...

    @property
    def values(self) -> Array:
        """The vector; it may be computed when it is first read."""
        ...


class Problem(NamedTuple):
    """Reason why a step fails on all ranks.

    Attributes
    ----------
    ranks : tuple of int
        Ranks whose numbers are not finite; empty: a sum or scale has overflowed.
    quantity : str
        Name of the quantity that overflowed, such as "the scale"; empty: the vector itself.
    out_of_range : str
        End of the sentence about finite numbers that the codec cannot represent; empty: not the reason.

    Examples
    --------
    >>> from mpicomp.feedback.base import Problem
    >>> Problem(ranks=(1,))
    Problem(ranks=(1,), quantity='', out_of_range='')
    """

    ranks: tuple[int, ...] = ()
    quantity: str = ""
    out_of_range: str = ""


class Residual:
    """Vector that a step replaces as a whole.

    A step reads `current` and writes `following`. `commit` swaps them, so a step that fails changes nothing, and `undo`
    swaps them back: until the next step writes, the vector of before is intact.

    Parameters
    ----------
    place : Space or Device
        Where the vector is.
    n : int
    dtype : dtype
    kind : "mean", "owner" or "shared"
        The ranks continue from the mean of their vectors, each element is of the rank that owns it, or the vectors are
        equal on all ranks.
    pending : bool
        A "mean" or an "owner"'s vector is an error that the method has yet to contribute to the result: a dense step of
        `Auto` adds it, and so do the survivors of a dead rank, from a copy. False: other state, such as momentum.

    Examples
    --------
    >>> import numpy as np
    >>> from collectives.arrays import HOST_DEVICE
    >>> from mpicomp.feedback.base import Residual
    >>> residual = Residual(HOST_DEVICE, n=2, dtype=np.float32)
    >>> residual.following[:] = 0.5
    >>> residual.commit()
    >>> residual.to_host().tolist()
    [0.5, 0.5]
    >>> residual.undo()
    >>> residual.current.tolist()
    [0.0, 0.0]
    """

    def __init__(
        self, place: Space | Device, n: int, dtype: DTypeLike, kind: StateKind = "mean", pending: bool = True
    ) -> None:
        self.kind, self._space, self._dtype = kind, space_of(place), np.dtype(dtype)
        self.is_pending = pending
        self.current, self.following = (self._space.zeros(n, dtype) for _ in range(2))

    def commit(self) -> None:
        """Make the vector that the step has written the current one."""
        self.current, self.following = self.following, self.current

    undo = commit

    @property
    def like(self) -> AnyArray:
        """Array of the host with the vector's shape and type; it takes no memory."""
        return np.broadcast_to(np.zeros((), self._dtype), len(self.current))

    def to_host(self) -> AnyArray:
        """Return a copy in the host's memory; waits for the device."""
        return self._space.saved(self.current)

    def restore(self, values: AnyArray) -> None:
        """Overwrite the current vector; waits for the device."""
        self._space.overwrite(self.current, values)


class Feedback(ABC):
    """One rank's half of a step: the state it carries, and the encoding and decoding of pieces.

    The driver of a step (`mpicomp.aggregator.step`) calls, in this order: `begin`; if `reports_first`, `measure`,
    `announce` and `adopt_announced`; `fix_scales`; `encode` of every piece; if `reports_when` is set, `report` and
    `adopt`; `decode` of every piece; `end_decoding`; and `commit` or `roll_back`. Several threads may encode and decode
    different pieces at once.

    Parameters
    ----------
    place : Space or Device
        Where vectors are encoded.
    residuals : dict of str to Residual
        By their keys in the state.

    Attributes
    ----------
    space, device : Space
        The place: its memory, kernels and copies.
    n_reports : int
        Numbers that each rank reports to all others in a step.
    announced_bytes : int or None
        Bytes that each rank announces before it encodes; None: it announces its reports.
    measured_in : sequence of range
        Elements of the vector that one worker measures at a time; empty: it is measured as a whole.
    reports_when : "beside", "after" or None
        Ranks report while payloads travel, once a rank has encoded all of its pieces; or after the reducer has ended.
    decodes_with_reports : bool
        `decode` needs the reports of all ranks.
    state_nan : str
        Key of the entry that may hold NaN.
    matrix_rows : sequence of int or None
        Rows of the vector's matrices, which ranks compare, as equal lengths may be different matrices.
    pending_factor : float
        Amount that an element of a pending error stands for: an exact mean that clears the errors adds so much of them.
    stand_in : callable or None
        ``stand_in(state, elements)`` makes the state of an owner that has died, from a survivor's; None: no owners.

    Examples
    --------
    `mpicomp help extending` has complete ones. This is the feedback of a method:

    >>> import mpicomp
    >>> from mpicomp.feedback.base import Feedback
    >>> with mpicomp.Communicator() as comm:
    ...     feedback = mpicomp.LocalTopK(rate=2).start(comm, 4).feedback
    >>> isinstance(feedback, Feedback), list(feedback.residuals), feedback.n_reports, feedback.reports_when
    (True, ['residual'], 1, 'beside')
    """

    n_reports: int = 0
    announced_bytes: int | None = None
    measured_in: Sequence[range] = ()
    reports_when: Literal["beside", "after"] | None = None
    decodes_with_reports: bool = False
    state_nan: ClassVar[str] = ""
    matrix_rows: Sequence[int] | None = None
    pending_factor: float = 1.0
    stand_in: Callable[[State, range], State] | None = None

    def __init__(self, place: Space | Device, residuals: Mapping[str, Residual]) -> None:
        self.space = self.device = space = space_of(place)
        self.kernels, self.launch = space.kernels, space.launch
        self.residuals = dict(residuals)
        self._begun = self._committed = False

    # One step --------------------------------------------------------------------------------------------------------

    def rounds(self) -> tuple[Round, ...]:
        """Return the exchanges of a step in their order; one where it `decodes_with_reports`."""
        return (Round(self.encode, self.decode),)

    def reads_pieces(self, step: int) -> bool:
        """Return True if a step reads each piece of the vector once, and in no order, by ``call.read``."""
        return False

    def begin(self, call: StepInput) -> None:
        """Take the vector and the result of another step."""
        self._begun = True

    def reports_first(self, step: int) -> bool:
        """Whether ranks must know each other's reports before they encode this step."""
        return False

    def measure(self) -> Testable | None:
        """Compute the numbers of `announce`. Returns a handle where a device computes them."""
        return None

    def measure_share(self, share: range) -> None:
        """Compute the numbers of a share, in place of `measure`; several threads do that at once."""
        return

    def announce(self, row: Doubles, announced: Bytes) -> None:
        """Write the numbers that all ranks need before they encode: the reports, unless there are `announced_bytes`."""
        self.report(row)

    def adopt_announced(self, reports: Doubles, announced: Sequence[Bytes]) -> Problem | None:
        """Take in the announced numbers of all ranks, on all ranks alike. Returns the reason if the step must fail."""
        return self.adopt(reports)

    def report(self, row: Doubles) -> None:
        """Write this rank's reports, float64[n_reports]."""
        return

    def adopt(self, reports: Doubles) -> Problem | None:
        """Take in float64[ranks, n_reports], on all ranks alike. Returns the reason if the step must fail.

        Messages may still be in flight, so it must not raise.
        """
        return None

    def fix_scales(self) -> Problem | None:
        """Fix the scales that encoding needs. Returns the reason if the step must fail."""
        return None

    @abstractmethod
    def encode(self, piece: int) -> Testable | None:
        """Encode a piece of this rank's vector and write its part of the next residual.

        Returns
        -------
        Testable or None
            Handle that completes once the payload is in the host's memory; None: it is there.
        """

    @abstractmethod
    def decode(self, piece: int) -> Testable | None:
        """Write a piece of the result from its complete payload; returns as `encode` does."""

    def end_decoding(self, call: StepInput) -> Testable | None:
        """All pieces are decoded on this rank. Returns a handle if the result is complete only once that is."""
        return None

    def end(self) -> None:
        """Drop references to the caller's arrays."""
        self._begun = False

    def commit(self) -> None:
        """Make the step's residual the current one: the step has succeeded on all ranks."""
        self._committed = self._begun
        if self._begun:
            for residual in self.residuals.values():
                residual.commit()
        self.end()

    def roll_back(self) -> None:
        """Keep the residual of before: the step has failed."""
        self.end()

    def undo(self) -> None:
        """Take the last `commit` back; no step has begun since."""
        if self._committed:
            for residual in self.residuals.values():
                residual.undo()

    @property
    def can_undo(self) -> bool:
        """Whether the residual of before the last step is kept."""
        return True

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def state_kinds(self) -> dict[str, StateKind]:
        """Kind of each entry of `state`."""
        return {key: residual.kind for key, residual in self.residuals.items()}

    @property
    def pending_keys(self) -> frozenset[str]:
        """Keys of the entries of `state` that are errors which the method has yet to contribute."""
        errors = [key for key, kind in self.state_kinds.items() if kind in BY_ELEMENT]
        return frozenset(key for key in errors if key not in self.residuals or self.residuals[key].is_pending)

    @property
    def residual(self) -> Array | None:
        """Vector that compression has left out so far, float32[n] or float64[n]; a tensor where a device encodes."""
        residual = self.residuals.get("residual")
        return None if residual is None else residual.current

    def why_unusable(self) -> str:
        """Return the earlier error that must be repaired first, and how; empty if the next step can be made."""
        return ""

    def state(self) -> State:
        """Return copies of all that the next step depends on, by the keys of `state_kinds`."""
        return {key: residual.to_host() for key, residual in self.residuals.items()}

    def like(self) -> State:
        """Return an array with the expected shape and type for each entry that a state must have."""
        return {key: residual.like for key, residual in self.residuals.items()}

    def load(self, state: State) -> str:
        """Take over a checked state. Returns a description of the parts that ranks must compare, or ""."""
        for key, residual in self.residuals.items():
            residual.restore(state[key])
        return ""

    def localize(self, state: Any, where: str) -> Any:
        """Return this rank's part of a state, which may be of all ranks; `where` starts the message of a ValueError."""
        return state

    def all_finite(self, values: Array) -> bool:
        """Return True if a float32 or float64 vector has neither NaN nor infinity; waits for the device."""
        return self.space.all_finite(values)

    def check_owner(self, state: dict[str, Any], where: str) -> None:
        """Raise ValueError if a state has entries for elements that another rank owns; `where` starts the message."""
        return


class NoFeedback(Feedback):
    """Feedback of a method whose vectors travel as they are: nothing is kept or encoded."""

    def __init__(self) -> None:
        super().__init__(HOST, {})

    @override
    def encode(self, piece: int) -> None:
        return

    decode = encode


def overwrite(space: Space, vector: Array, values: Array) -> None:
    """Overwrite a vector of a space; see `Space.overwrite`."""
    space.overwrite(vector, values)


def narrow_into(values: Array, dtype: str, out: Array) -> Any:
    """Round float32 to float16 or bfloat16 words on the device of the arrays; returns whether all is finite."""
    words = out.view(np.uint16) if isinstance(out, np.ndarray) else out
    return kernels.beside(values).sixteen_bits.narrow(values, dtype == "bfloat16", words)


def bad_ranks(marks: Any) -> tuple[int, ...]:
    """Return the ranks whose mark is set.

    Parameters
    ----------
    marks : bool[ranks]

    Returns
    -------
    tuple of int

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.feedback.base import bad_ranks
    >>> bad_ranks(np.array([False, True, True]))
    (1, 2)
    """
    return tuple(int(rank) for rank in np.flatnonzero(marks))


def compute_type(dtype: str) -> type[np.floating]:
    """Return the type in which vectors are computed.

    Parameters
    ----------
    dtype : str
        "float16", "bfloat16", "float32" or "float64".

    Returns
    -------
    type
        float64 for "float64", else float32.

    Examples
    --------
    >>> from mpicomp.feedback.base import compute_type
    >>> compute_type("bfloat16").__name__
    'float32'
    """
    return np.float64 if dtype == "float64" else np.float32
