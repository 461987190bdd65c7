"""Base of methods: options, and the parts that implement them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial, update_wrapper, wraps
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import numpy as np

from collectives import Communicator
from collectives.errors import explains_itself, reword
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import suggestion
from collectives.recovery.fault_tolerance import repeat_after_deaths
from mpicomp.aggregator.arguments import memory_in_words, vector_spec
from mpicomp.aggregator.base import Aggregator
from mpicomp.aggregator.parts import Driver, MessageModel, Parts, Reducer, StateKind, Synchronize, VectorSpec
from mpicomp.aggregator.rehearsal import compile_kernels, compile_on_device
from mpicomp.aggregator.step import StepDriver

__all__ = ["Algorithm", "Driver", "MessageModel", "Parts", "Reducer", "StateKind", "Synchronize", "VectorSpec"]


_Method = TypeVar("_Method", bound=Callable[..., Any])


class _OnInstances:
    """Descriptor of a method that raises a TypeError with the cure if it is called on the class."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        update_wrapper(cast(Any, self), method)

    def __get__(self, instance: Any, owner: type[Any]) -> Callable[..., Any]:
        if instance is not None:
            return MethodType(self._method, instance)

        @wraps(self._method)
        def call(*args: Any, **options: Any) -> Any:
            if args and isinstance(args[0], owner):
                return self._method(*args, **options)
            name = f"{owner.__name__}.{self._method.__name__}"
            cure = f"write {owner.__name__}().start(comm, n), with parentheses behind {owner.__name__}"
            problem = f"{name} was called on the class, which has no options yet: {cure}"
            comm = next((one for one in args if isinstance(one, Communicator)), None)
            if comm is not None:
                comm.reject(TypeError(f"{comm.here}, {problem}"), self._method.__name__)
            raise TypeError(problem) from None

        return call


def on_instances(method: _Method) -> _Method:
    """Decorate a method of `Algorithm` that users may call on the class by mistake."""
    return cast(_Method, _OnInstances(method))


class Algorithm(ABC):
    """Base of a method's options: a frozen dataclass.

    Attributes
    ----------
    synchronize : "updates" or "gradients"
        Best input of the method: the local optimizer's updates, or the gradients.
    symbols : mapping
        Options by the paper's symbols, for messages.

    Raises
    ------
    TypeError
        There is no such option; the message names the nearest one.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> from mpicomp.algorithms import Algorithm
    >>> method = mpicomp.algorithm("marsit", seed=1)
    >>> isinstance(method, Algorithm), method.synchronize
    (True, 'updates')
    >>> with mpicomp.Communicator() as comm:
    ...     aggregator = method.start(comm, 3)
    ...     aggregator.aggregate(np.array([1.0, -2.0, 3.0], np.float32))
    array([ 1., -2.,  3.], dtype=float32)
    >>> mpicomp.Marsit(K=10)
    Traceback (most recent call last):
        ...
    TypeError: Marsit has no option 'K' (did you mean 'full_precision_every'?): it has full_precision_every, ...
    """

    synchronize: ClassVar[Synchronize] = "gradients"
    symbols: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the names of options: the error of a dataclass would name neither the nearest nor all options."""
        known: list[str] = [field.name for field in fields(cls) if field.init] if is_dataclass(cls) else []
        for name in options:
            if name not in known:
                meant = cls.symbols.get(name.lower())
                found = f" (did you mean {meant!r}?)" if meant else suggestion(name, known)
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise TypeError(f"{cls.__name__} has no option {name!r}{found}: {has}")
        return super().__new__(cls)

    # hidden from type checkers, which would accept any misspelt attribute
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            problem = f"{kind!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(Aggregator, name):
                cure = f"aggregator = {kind}(...).start(comm, n), then aggregator.{name}"
                problem += f": {kind} holds options, and its aggregator has {name!r}; write {cure}"
            raise AttributeError(problem)

    @property
    def uses_tensor_lengths(self) -> bool:
        """True if `tensor_lengths` affect results; otherwise a vector's tensors need no padding between them."""
        return False

    @property
    def estimates_mean(self) -> bool:
        """True if a result estimates the ranks' mean; False if the caller must scale it or it depends on the past."""
        return True

    @property
    def leaves_residual(self) -> bool:
        """True if the caller adds the error of a step, its `Aggregator.residual`, to the next vector."""
        return False

    @property
    def keeps_scale(self) -> bool:
        """True if results have the magnitude of the vectors; otherwise a learning rate must scale them afterwards."""
        return True

    @property
    def full_precision_every(self) -> int | None:
        """K, where steps 0, K, 2K, ... are dense; None: no steps are, after the first ones."""
        return None

    @property
    def nonfinite(self) -> str:
        """Treatment of steps with NaN or infinity: "raise" or "skip"."""
        return "raise"

    @property
    def has_rates_by_position(self) -> bool:
        """True if tensors have rates by their places in a vector."""
        return False

    @property
    def rehearsed(self) -> tuple[Algorithm, ...]:
        """Methods whose kernels the steps call."""
        return (self,)

    def shard_alignment(self, n: int, dtype: str) -> int | None:
        """Return the number of elements at whose multiples a vector may be cut in shards; None: between tensors."""
        return self.message_model(n, dtype, 1, 1 << 20).alignment

    def connect(self, comm: Communicator) -> None:
        """Make the communicators that the method needs besides `comm`; collective, and no-op the second time."""
        return

    def encodes_on_devices(self, dtype: str) -> bool:
        """Return True if vectors of this type can be encoded on the GPU that holds them."""
        return False

    @property
    def needs_devices(self) -> bool:
        """True if vectors cannot be encoded on the CPU."""
        return False

    def of_gradients(self) -> Algorithm:
        """Return the method with its defaults for gradients, where these differ from those for updates."""
        if self.leaves_residual:
            raise ValueError(
                f"{self}: gradients have no copy of the model; pass residual='own' or synchronize=\"updates\""
            )
        return self

    def is_dense(self, step: int) -> bool:
        """Return True if a step averages the vectors in full precision, by the reducer ``parts(...).dense``."""
        return False

    @abstractmethod
    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Return the parts of an aggregator for such vectors."""

    def assemble(self, comm: Communicator, spec: VectorSpec) -> tuple[Parts, Driver]:
        """Return the parts of an aggregator for such vectors, and the driver of its steps."""
        parts = self.parts(comm, spec)
        return parts, StepDriver(comm, parts, self.is_dense)

    @abstractmethod
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """Return the sizes of messages for vectors of `n` elements; packed pieces have at most `piece_bytes`."""

    @on_instances
    @keep_uncompiled
    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: Any = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
        tensor_shapes: Sequence[Sequence[int]] | None = None,
        device: Any = "cpu",
    ) -> Aggregator:
        """Create the aggregator for vectors of one length.

        All ranks create their aggregators of a communicator in the same order.

        Parameters
        ----------
        comm : Communicator
        n : int
            Number of elements.
        dtype : dtype or str
            Type of the vectors: float16, bfloat16, float32 or float64, as a type of NumPy or torch or as text.
        vector_id : int
            Number of the vector. Vectors with one seed and different numbers use different random words.
        tensor_lengths : sequence of int, optional
            Lengths of parts, such as tensors, that get scales of their own. Each part begins at the next multiple of
            64 elements; the padding between parts holds zeros, which do not count.
        tensor_shapes : sequence of sequence of int, optional
            Shapes of the tensors, instead of `tensor_lengths`, for methods that need rows and columns.
        device : str or torch.device
            Device that encodes: "cpu", for vectors on any device, or a GPU such as "cuda" or "cuda:1", which must hold
            the vectors. GPUs need a method whose `encodes_on_devices(dtype)` is True. Ranks may use different devices.

        Returns
        -------
        Aggregator

        Raises
        ------
        TypeError, ValueError
            An argument cannot be used; the other ranks raise CollectiveMismatch in their next call.
        MemoryError
            The vector is larger than this machine's memory, or this rank or the device lacks memory for the
            method's state; the other ranks raise CollectiveMismatch in their next call. All ranks can start again.
        CommunicatorClosed

        Examples
        --------
        Two tensors, of 100 x 10 and 10 elements, of which the second begins at a multiple of 64:

        >>> import mpicomp
        >>> with mpicomp.Communicator() as comm:
        ...     signs = mpicomp.EFSignSGD().start(comm, 1024 + 10, dtype="float16", tensor_lengths=(1000, 10))
        >>> signs.n, signs.dtype, signs.vector_id
        (1034, 'float16', 0)
        """
        lengths, shapes = (tensor_lengths, tensor_shapes) if self.uses_tensor_lengths else (None, None)
        spec = vector_spec(comm, n, dtype, vector_id, lengths, str(device), self, shapes)
        comm.calls.require_open()
        repeat_after_deaths(partial(self.connect, comm))
        on_host = spec.device == "cpu"
        (compile_kernels if on_host else compile_on_device)(self, comm, spec)
        # PyTorch reports a lack of memory by a RuntimeError
        rejected = (TypeError, ValueError, MemoryError) + (() if on_host else (RuntimeError,))
        try:
            with comm.tags_unused(unless_made=True):
                return Aggregator(self, comm, spec)
        except rejected as error:
            if explains_itself(error):  # the ranks have agreed on it
                raise
            # The tags that the other ranks take are taken here too: all ranks can start again.
            with suppress(*rejected):
                Aggregator(self, comm, replace(spec, n=0, device="cpu", tensor_lengths=None, tensor_shapes=None))
            comm.reject(self._describe_failure(error, comm, spec), "start")

    def _describe_failure(self, error: Exception, comm: Communicator, spec: VectorSpec) -> Exception:
        """Return the error of a start that has failed, with the rank and the cure."""
        if isinstance(error, TypeError | ValueError):
            return reword(error, f"{comm.here}, start: {error}")
        if spec.device == "cpu":
            problem = f"there is no memory for what {self} keeps for {spec.n} elements ({error}; {memory_in_words()})"
            cure = "free memory, or take fewer ranks a node"
        else:
            problem = f"{spec.device} cannot hold what {self} keeps for {spec.n} elements ({error})"
            cure = "free memory there, or leave out device"
        return MemoryError(f"{comm.here}, start: {problem}; {cure}")
