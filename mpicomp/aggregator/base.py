"""The aggregator: checks a vector, agrees with the other ranks on the call, and computes the mean with its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, overload
from weakref import ref

from collectives import Communicator, Handle, TrafficLog
from collectives.annotations import AnyArray, Array, Kept
from collectives.arrays import DeviceStream, named, require_stream
from collectives.arrays.vectors import Flat
from collectives.errors import refuse_copies, reword
from collectives.execution.call import Steps
from collectives.execution.uncompiled import keep_uncompiled
from collectives.group.routes import VERSION
from collectives.listed_names import Listed
from collectives.quoting import one_line
from mpicomp.aggregator.arguments import expression
from mpicomp.aggregator.call import CallText, VectorCall
from mpicomp.aggregator.difference import Difference
from mpicomp.aggregator.parts import Driver, Parts, StateKind, VectorSpec
from mpicomp.aggregator.spec import tensors_listed
from mpicomp.aggregator.vector_views import VectorViews
from mpicomp.layers.staging import LastWork, StagedCall
from mpicomp.layers.widening import Widening
from mpicomp.recovery.continuation import Continuation
from mpicomp.recovery.joint_end import JointEnd
from mpicomp.state import state_check as states

_NO_NUMBERS = None, None


class Layer(Protocol):
    """Part of the work of a call around the steps of its method."""

    def around(self, call: VectorCall, steps: Callable[[VectorCall], Steps]) -> Steps:
        """Return the steps of a call, among them those of `steps`."""
        ...


class Method(Protocol):
    """Options that choose the parts of an aggregator, see `mpicomp.aggregator.algorithm.Algorithm`."""

    def assemble(self, comm: Communicator, spec: VectorSpec) -> tuple[Parts, Driver]:
        """Return the parts for vectors of this kind, and the driver that calls them."""
        ...


@refuse_copies(lambda one: one._where, "copy or save its state_dict(), or leave it out")
class Aggregator(metaclass=Listed):
    """Residual, step counter and buffers of one vector. `Algorithm.start` makes it.

    Parameters
    ----------
    algorithm : Method
        Options of the method.
    comm : Communicator
    spec : VectorSpec
        Length, type and device of the vectors.

    Attributes
    ----------
    algorithm, comm, spec
        The parameters.
    feedback : Feedback
        State that is carried from step to step.
    reducer : Reducer
        Exchanges payloads between ranks.
    driver : Driver
        Makes steps with these parts.
    step : int
        Steps taken.
    traffic : TrafficLog
        Bytes, messages and seconds of the last step and of all steps.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def train(comm):
    ...     aggregator = mpicomp.LocalTopK(rate=2).start(comm, 2)
    ...     model = np.array([1.0, 1.0], np.float32)
    ...     for step in range(2):
    ...         model -= aggregator.aggregate(np.array([0.5, 0.375], np.float32))
    ...     return model.tolist(), aggregator.step, aggregator.residual.tolist()
    >>> mpicomp.run_local(2, train)[0]  # an element that was not sent is added to the next step's
    ([0.5, 0.25], 2, [0.5, 0.0])
    """

    listed = (
        *("algorithm", "comm", "n", "dtype", "vector_id", "step", "residual", "traffic", "aggregate", "begin"),
        *("can_undo", "undo", "state_dict", "check_state_dict", "load_state_dict", "state_kinds"),
    )

    def __init__(self, algorithm: Method, comm: Communicator, spec: VectorSpec) -> None:
        self.algorithm, self.comm, self.spec = algorithm, comm, spec
        self.traffic = TrafficLog()
        self.step = 0
        self._first_tag = comm.users.last_tag
        self._device = None if spec.device == "cpu" else named(spec.device)
        self._assemble()
        # around the steps of each call, the innermost first
        self._layers: tuple[Layer, ...] = (Widening(spec),) if spec.is_narrow else ()
        self.views = VectorViews(spec, self._device)
        self._call: VectorCall | None = None  # in flight, or ended unseen by its caller
        self._last_work = LastWork()
        self._can_undo = False
        self._carried: tuple[AnyArray | None, AnyArray | None] = _NO_NUMBERS
        self._self: ref[Aggregator] = ref(self)
        if comm.recovery is not None:
            comm.recovery.join(self, Continuation)

    def _assemble(self) -> None:
        """Make the parts, for the ranks that there are."""
        algorithm, comm, spec = self.algorithm, self.comm, self.spec
        self.tag = comm.fixed_tag()
        parts, self.driver = algorithm.assemble(comm, spec)
        self.feedback: Any = parts.feedback
        self.reducer = parts.reducer
        lengths = spec.tensor_lengths
        tensors = "" if lengths is None else f" in {tensors_listed(lengths)}"
        if matrix_rows := self.feedback.matrix_rows:  # equal lengths may be different matrices
            tensors += f", rows of {tensors_listed(matrix_rows)},"
        self.joint_end = None if comm.recovery is None else JointEnd(comm, algorithm, self.driver, self.feedback)
        if self.joint_end is not None:
            tensors += self.joint_end.description
        text = f"aggregate of {spec.dtype}[{spec.n}]{tensors} number {spec.vector_id} by {algorithm} over "
        text += f"{comm.routes}, wire format {VERSION}, tag {self.tag}"
        self._text = CallText(comm, algorithm, spec, self.tag, text)

    def __dir__(self) -> list[str]:
        """Return the names that programs use, for completion. The others are for methods and optimizers."""
        return [*self.listed]

    def __repr__(self) -> str:
        spec, comm = self.spec, self.comm
        kind = f"{spec.dtype}[{spec.n}]" if spec.device == "cpu" else f"{spec.dtype}[{spec.n}] on {spec.device}"
        state = f"{self.step} step{'s'[: self.step != 1]} done"
        if self._call is not None and not self._call.done:
            state += ", one pending"
        if problem := self.feedback.why_unusable():
            state += f", unusable: {one_line(problem)}"
        return f"<Aggregator by {expression(self.algorithm)} of {kind}, {comm.here}: {state}>"

    @property
    def n(self) -> int:
        """Number of elements."""
        return self.spec.n

    @property
    def dtype(self) -> str:
        """Type of the vectors: "float16", "bfloat16", "float32" or "float64"."""
        return self.spec.dtype

    @property
    def vector_id(self) -> int:
        """Number of the vector among those that share a seed."""
        return self.spec.vector_id

    @property
    def _where(self) -> str:
        return f"{self.comm.here}, vector {self.vector_id}"

    @property
    def residual(self) -> AnyArray | None:
        """Pending compression error, float32[n] or float64[n]; None, or of no elements, if the method keeps none.

        Steps overwrite the array: copy it to keep the values.
        """
        residual: AnyArray | None = self.feedback.residual
        return residual

    # One step --------------------------------------------------------------------------------------------------------

    @overload
    def aggregate(self, vector: Kept, out: Kept | None = None, stream: DeviceStream | None = None) -> Kept: ...
    @overload
    def aggregate(self, vector: Difference, out: Kept, stream: DeviceStream | None = None) -> Kept: ...
    @overload
    def aggregate(self, vector: Difference, out: None = None, stream: DeviceStream | None = None) -> AnyArray: ...
    @keep_uncompiled
    def aggregate(
        self, vector: Array | Difference, out: Array | None = None, stream: DeviceStream | None = None
    ) -> Array:
        """Approximate the mean of the ranks' vectors.

        Parameters
        ----------
        vector : array[n] or Difference
            NumPy or DLPack array, contiguous, of the aggregator's dtype; not changed. It must be on the device that
            the aggregator was started for, or on any device if that is the CPU: from a GPU it then crosses through
            pinned memory. The vector of a `Difference` may be overwritten; call ``subtract_result()`` afterwards, which
            reports where the result is.
        out : array[n], optional
            Overwritten with the result; not the vector itself.
        stream : torch.cuda.Stream, optional
            Stream that uses a result on a GPU, and waits for it in the host's place: see `Handle.wait`.

        Returns
        -------
        like vector

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure, NonFiniteGradient
            The content of `out` is undefined then.
        TypeError, ValueError
            This rank's vector cannot be aggregated, or `stream` is no stream of PyTorch or captures a CUDA graph; the
            others then raise CollectiveMismatch.
        RuntimeError
            An earlier error spoiled the residual, on all ranks; or an earlier call has not ended.

        Examples
        --------
        >>> import numpy as np
        >>> import mpicomp
        >>> def average(comm):
        ...     result = np.empty(2, np.float32)
        ...     votes = mpicomp.MajorityVote().start(comm, 2)
        ...     return votes.aggregate(np.array([1.0, -comm.rank - 1.0], np.float32), out=result) is result
        >>> mpicomp.run_local(3, average)
        [True, True, True]
        """
        if stream is not None:
            with self.comm.refusing("aggregate", TypeError, ValueError, where=self._where):
                require_stream(stream)
            return self.begin(vector, out).wait(stream)
        observer = self.comm.observer
        if observer is None:
            return self.comm.run(*self._open(vector, out))
        named = type(self.algorithm).__name__
        with observer.span("call", "aggregate", method=named, vector=self.vector_id, step=self.step, elements=self.n):
            return self.comm.run(*self._open(vector, out))

    @overload
    def begin(self, vector: Kept, out: Kept | None = None) -> Handle[Kept]: ...
    @overload
    def begin(self, vector: Difference, out: Kept) -> Handle[Kept]: ...
    @overload
    def begin(self, vector: Difference, out: None = None) -> Handle[AnyArray]: ...
    @keep_uncompiled
    def begin(self, vector: Array | Difference, out: Array | None = None) -> Handle:
        """Like `aggregate`, but returns at once.

        The ranks begin their calls in one order, and may poll them and wait for them in any. Each aggregator has one
        call in flight at most. Do not touch `vector` and `out` until the call has ended.

        Parameters
        ----------
        vector, out
            As in `aggregate`.

        Returns
        -------
        Handle
            ``poll()`` makes progress and returns True once the result is there, ``wait()`` returns the result; either
            may raise the errors of `aggregate`. The residual and the step counter change only if the call succeeds.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As in `aggregate`.
        CommunicatorClosed

        Examples
        --------
        >>> import numpy as np
        >>> import mpicomp
        >>> def average_two(comm):
        ...     layers = [mpicomp.QSGD().start(comm, 2, vector_id=number) for number in range(2)]
        ...     handles = [layer.begin(np.full(2, comm.rank, np.float32)) for layer in layers]
        ...     return [handle.wait().tolist() for handle in handles]
        >>> mpicomp.run_local(3, average_two)[0]
        [[1.0, 1.0], [1.0, 1.0]]
        """
        call, steps = self._open(vector, out)
        self._call = call  # now, as a progress thread may begin the steps later
        try:
            return self.comm.begin(call, steps)
        except BaseException:
            self.let_go(call)
            raise

    def carry(self, numbers: AnyArray, sums: AnyArray) -> None:
        """Have the next call sum `numbers` over the ranks, in the messages by which the ranks compare the call.

        Parameters
        ----------
        numbers : array
            A few numbers, of equal length and dtype on all ranks; not changed.
        sums : array
            Overwritten with the sums before the call ends, unless the ranks make different calls.
        """
        self._carried = numbers, sums

    def _open(self, vector: Array | Difference, out: Array | None) -> tuple[VectorCall, Iterator[bool]]:
        """Return a call of this vector, and its steps."""
        comm, step = self.comm, self.step
        # before the parts are read, which a progress thread may replace meanwhile
        epoch = 0 if comm.recovery is None else comm.recovery.count
        numbers, sums = self._carried
        if numbers is not None:
            self._carried = _NO_NUMBERS
        difference, source, target = None, None, None
        result: Array = out
        refused: Exception | None = None
        if self._call is not None:
            refused = self._second_call(self._call)
        elif problem := self.feedback.why_unusable():
            refused = RuntimeError(problem)
        elif not self.views.are_plain(vector, out):
            try:
                difference = vector if isinstance(vector, Difference) else None
                source, target, result = self.views.of(vector, out)
            except (TypeError, ValueError, MemoryError, RuntimeError) as error:  # the last one is a device's
                refused = error  # unless it is a signal handler's, which `reword` raises
        if refused is not None:
            found = reword(refused, f"{self._where}: {refused}")
            self._can_undo = False  # as on the other ranks, where this step fails
            comm.reject(found, "aggregate")
        traffic = self.traffic.begin()
        values: Any = vector if source is None else source.values if difference is None else None
        written: Any = out if target is None else target.values
        call = VectorCall(self._text, step, self._self, values, difference, written, traffic)
        call.result = result
        if comm.recovery is not None:
            call.remake = partial(self._begin_steps, call, source, target, numbers, sums)
            call.epoch = epoch
        return call, self._begin_steps(call, source, target, numbers, sums)

    def _begin_steps(
        self,
        call: VectorCall,
        source: Flat | None,
        target: Flat | None,
        numbers: AnyArray | None,
        sums: AnyArray | None,
    ) -> Iterator[bool]:
        """Return the steps of a call; also where it is made again."""
        comm, step, traffic, driver = self.comm, call.step, call.traffic, self.driver
        mark = self._text.fingerprint + step
        prepare = partial(driver.prepare, step) if driver.prepares else None
        if numbers is None and self.spec.n and driver.compares(step):
            # the mark differs from that of a call whose comparison has no reports in its messages
            call.compare, call.is_compared = partial(comm.check, call, ~mark, traffic, meanwhile=prepare), True
            return self._steps(call, None, source, target)
        call.is_compared = numbers is not None
        check = comm.check(call, mark, traffic, numbers, sums, prepare)
        return self._steps(call, check, source, target)

    def _steps(
        self, call: VectorCall, check: Iterator[bool] | None, source: Flat | None, target: Flat | None
    ) -> Iterator[bool]:
        self._call, self._can_undo = call, False
        joint, end, layers = self.joint_end, self.joint_end or self.driver, self._layers
        try:
            if source is not None and target is not None and not source.place is target.place is None:
                staged = StagedCall(self._last_work, source, target, self.driver.array_steps)
                layers = (*layers, staged)
                yield from staged.arrive(call)
            if check is None:
                call.group.enter(call)
            else:
                yield from check
            try:
                steps: Callable[[VectorCall], Steps] = self.driver.steps
                for layer in layers:
                    steps = partial(layer.around, steps=steps)
                yield from steps(call)
                if joint is not None:
                    yield from joint.steps(call)
            except BaseException:
                end.roll_back()
                raise
            end.commit()
            self.step += 1
            self._can_undo = True
            call.traffic.ended = call.traffic.clock()
            self.traffic.total.add(call.traffic)
        finally:
            call.compare = None  # refers to the call
            if not call.background:
                self._call = None

    def count_step(self) -> None:
        """Count a step that the caller made without the aggregator, as there was nothing to compress or send."""
        self.traffic.begin()
        self.step += 1
        self._can_undo = False

    @property
    def can_undo(self) -> bool:
        """True if `undo` can take back the last step."""
        return self._call is None and self._can_undo and self.driver.can_undo

    @keep_uncompiled
    def undo(self) -> None:
        """Take the last step back: restore residual and step counter. Messages that were sent stay counted.

        For callers of several aggregators whose steps succeed or fail together. All ranks must take the step back.

        Raises
        ------
        RuntimeError
            A step is under way, the last one failed or was taken back, or the method keeps no previous state.

        Examples
        --------
        >>> import numpy as np
        >>> import mpicomp
        >>> with mpicomp.Communicator() as comm:
        ...     top_k = mpicomp.LocalTopK(rate=2).start(comm, 2)
        ...     mean = top_k.aggregate(np.array([4.0, 3.0], np.float32))
        ...     if top_k.can_undo:
        ...         top_k.undo()
        >>> top_k.step, top_k.residual.tolist()
        (0, [0.0, 0.0])
        """
        if not self.can_undo:
            raise RuntimeError(f"{self._where}: there is no step that can be taken back")
        self.driver.undo()
        self.step -= 1
        self._can_undo = False

    def let_go(self, call: VectorCall) -> None:
        """Allow another call: the caller has seen how this one ended."""
        if self._call is call:
            self._call = None

    def _require_waited(self) -> None:
        """Raise for a state that is taken or loaded while a call has not been waited for."""
        if self._call is not None and self._call.error is None:
            found = self._second_call(self._call, "a state is taken or loaded")
            raise reword(found, f"{self._where}: {found}") from found.__cause__

    def _second_call(self, call: VectorCall, later: str = "the next one") -> RuntimeError:
        """Return the error of another call, or of a change of the state, while `call` has not been waited for."""
        if not call.dropped:
            return RuntimeError(f"the call of step {call.step} is still in flight: wait() for it before {later}")
        failure, ended = None, ""
        try:
            # all ranks have begun this call, so it ends
            call.wait()
        except Exception as error:  # noqa: BLE001 - of the dropped call, not of this one
            failure, ended = error, f", and failed ({type(error).__name__}: {error})"
        finally:
            call.mark_seen()
        dropped = f"the call of step {call.step} was dropped without wait()"
        found = RuntimeError(f"{dropped}: keep what begin() returns{ended}")
        found.__cause__ = failure
        return found

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def state_kinds(self) -> dict[str, StateKind]:
        """Kind of each entry of a state, by its key: with them `mpicomp.redistribute` moves states to other ranks."""
        return {"method": "shared", "n": "shared", "step": "shared", **self.feedback.state_kinds}

    @keep_uncompiled
    def state_dict(self) -> dict[str, Any]:
        """Return copies of the arrays and numbers from which `load_state_dict` continues exactly.

        Each rank saves its own: states of ranks differ.

        Returns
        -------
        dict
            Arrays, numbers and texts, for `save_state`.

        Raises
        ------
        RuntimeError
            NaN or infinity spoiled the residual, so there is no state to continue from; or the caller has not waited
            for a call.

        Examples
        --------
        >>> import numpy as np
        >>> import mpicomp
        >>> with mpicomp.Communicator() as comm:
        ...     gradient = np.array([4.0, 3.0], np.float32)
        ...     top_k, again = (mpicomp.LocalTopK(rate=2).start(comm, 2) for number in range(2))
        ...     mean = top_k.aggregate(gradient)
        ...     again.check_state_dict(top_k.state_dict())
        ...     again.load_state_dict(top_k.state_dict())
        ...     again.aggregate(gradient)
        array([0., 6.], dtype=float32)
        """
        self._require_waited()
        return self.state()

    def state(self) -> dict[str, Any]:
        """Return a state that later steps overwrite."""
        if problem := self.feedback.why_unusable():
            raise RuntimeError(f"{self._where}: {problem}")
        return self._state(self.feedback.state())

    def load(self, state: dict[str, Any]) -> str:
        """Continue from a state; returns a description of the parts of it that the ranks compare."""
        taken = self._checked_state(state)
        restored: str = self.feedback.load(taken)
        self.step, self._can_undo = taken["step"], False
        return restored

    def make_again(self) -> None:
        """Make the parts again, with the same tags, where the ranks have become others."""
        with self.comm.users.tags_from(self._first_tag):
            self._assemble()

    @keep_uncompiled
    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check a state without loading it.

        Parameters
        ----------
        state : dict
            As from `state_dict`.

        Raises
        ------
        ValueError
            `load_state_dict` would raise it.
        """
        self._checked_state(state)

    @keep_uncompiled
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, to the bit; all ranks must load states of the same step.

        Parameters
        ----------
        state : dict
            As from `state_dict`, of this rank; not changed. `mpicomp.redistribute` makes states for other numbers of
            ranks.

        Raises
        ------
        ValueError
            The state belongs to another method, length or set of tensors, or is not finite. Nothing is changed then.
        RuntimeError
            The caller has not waited for a call.
        """
        self._require_waited()
        restored = self.load(state)
        if self.joint_end is not None:
            self.joint_end.forget()
        if restored:  # ranks that restored different states must notice it in their next call
            self._text = replace(self._text, restored=restored)

    def _state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Return a state of this step: the entries of all methods, and the method's own."""
        return {"method": type(self.algorithm).__name__, "n": self.n, "step": self.step, **entries}

    def _checked_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the checked content of a state; see `mpicomp.state.state_check.check`."""
        where = self._where
        like, state = self._state(self.feedback.like()), self.feedback.localize(state, where)
        taken = states.check(state, like, f"{self.algorithm} for {self.n} elements", where, self.feedback.state_nan)
        self.feedback.check_owner(state, where)
        return taken
