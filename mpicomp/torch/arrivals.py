"""Which gradients a backward has brought: hooks on the parameters tell it, while backward goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from collectives.compiling import keep_uncompiled


class Listener(Protocol):
    """Who is told of gradients."""

    arrivals: Arrivals

    def gradient_came(self, position: int) -> None:
        """A gradient was added to; the parameter is told by its position."""
        ...


_latest = WeakTensorKeyDictionary()  # who listens to a parameter and came last, as a weak reference


def listen(listener: Listener, parameters: Sequence[Tensor]) -> None:
    """Tell `listener` of every gradient from now on, for as long as there is one; it is referred to weakly.

    It is told of one at a time, though backward has a thread for each device, and the caller's for the CPU. Who listens
    to one of the parameters already is overtaken.
    """
    told = weakref.ref(listener)
    for parameter in parameters:
        earlier = _latest.get(parameter, told)()  # type: ignore[no-untyped-call]
        if earlier is not None and earlier is not listener:
            earlier.arrivals.overtaken = True
        _latest[parameter] = told

    one_by_one = threading.RLock()

    def hook_of(position: int) -> Callable[[Tensor], None]:
        @keep_uncompiled
        def hook(_: Tensor) -> None:
            alive = told()
            if alive is not None:
                with one_by_one:
                    alive.gradient_came(position)

        return hook

    handles = [
        parameter.register_post_accumulate_grad_hook(hook_of(position))  # type: ignore[no-untyped-call]
        for position, parameter in enumerate(parameters)
    ]
    weakref.finalize(listener, _remove, handles)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


class Arrivals:
    """Counts the gradients of a step.

    Parameters
    ----------
    names : sequence of str
        Of the parameters.
    passes : int
        How often each gradient comes before it is complete.

    Attributes
    ----------
    paused : bool
        Gradients that come do not count: they are added to what comes later.
    any_complete : bool
        A gradient of this step is complete.
    overtaken : bool
        Another optimizer over some of the parameters was made since. This one, which may be on its way out on one rank
        earlier than on another, is not to send anything during backward any more.
    """

    def __init__(self, names: Sequence[str], passes: int) -> None:
        self._names, self._passes = names, passes
        self._order: dict[int, None] = {}  # which keeps the order, and is asked at every gradient
        self.paused = self.overtaken = False
        self.restart()

    @property
    def order(self) -> list[int]:
        """The parameters, in the order in which their gradients came the first time."""
        return list(self._order)

    def restart(self) -> None:
        """A new step: no gradient has come."""
        self._counts = [0] * len(self._names)
        self.any_complete = False

    def complete(self, position: int, sent: bool) -> bool:
        """Count a gradient; whether it is complete.

        Raises
        ------
        RuntimeError
            It was complete before, and has been sent or may have been.
        """
        self._order.setdefault(position)
        if self.paused:
            return False
        self._counts[position] += 1
        if self._counts[position] > self._passes and sent:
            raise RuntimeError(
                f"the gradient of {self._names[position]!r} came once more after it was sent: call backward() "
                f"{'once' if self._passes == 1 else f'{self._passes} times'} between two steps; to accumulate "
                "gradients, call the others under `with optimizer.no_sync():`, or pass backward_passes_per_step=; if "
                "one backward() brings a gradient several times, as with reentrant checkpoints, pass overlap=False; "
                "drop an optimizer that is not to step any more; gradients that model.zero_grad() has dropped still "
                "count, so call optimizer.zero_grad() in its place"
            )
        complete = self._counts[position] == self._passes
        self.any_complete |= complete
        return complete
