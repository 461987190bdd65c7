"""Hooks that report the gradients of a backward, their counts, and changes of gradients that were sent too early."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from collectives.execution.uncompiled import keep_uncompiled
from mpicomp.torch.parameters import NamedParameter

WINDOW_ELEMENTS = 4096
SILENT_STEPS = 10
"""Steps without any gradient, on end, after which a rank warns."""
_LISTENER = "_mpicomp_listener"  # attribute of hooks: a weak reference
_Noted: TypeAlias = tuple[NamedParameter, Tensor, int, int]
"""A member, its gradient, and the version and the address that this had, or 0."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradientListener(Protocol):
    """Object that hooks report gradients to."""

    gradient_counts: GradientCounts

    def gradient_came(self, position: int) -> None:
        """Take note of a gradient that backward has added to, by the parameter's position."""
        ...


def install_hooks(listener: GradientListener, parameters: Sequence[Tensor], first: int = 0) -> None:
    """Report every gradient from now on to `listener`, as long as it lives; it is referred to weakly.

    The parameters have the positions from `first` on.

    Gradients are reported one at a time, though backward has a thread for each device, and the caller's for the CPU. A
    listener that is already registered for one of the parameters is overtaken.
    """
    latest = weakref.ref(listener)
    one_by_one = listener.gradient_counts.lock

    def register(position: int, parameter: Tensor) -> RemovableHandle:
        @keep_uncompiled
        def hook(_: Tensor) -> None:
            alive = latest()
            if alive is not None:
                with one_by_one:
                    alive.gradient_came(position)

        vars(hook)[_LISTENER] = latest
        attach: Callable[[Callable[[Tensor], None]], RemovableHandle] = parameter.register_post_accumulate_grad_hook
        return attach(hook)

    for parameter in parameters:
        # a registry with weak references to parameters would forbid to swap tensors
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            earlier = getattr(hook, _LISTENER, latest)()
            if earlier is not None and earlier is not listener:
                earlier.gradient_counts.overtaken = True
    for position, parameter in enumerate(parameters, first):
        weakref.finalize(listener, register(position, parameter).remove)


class GradientCounts:
    """Counts the gradients of a step; each is complete once it has come `passes` times.

    Attributes
    ----------
    paused : bool
        Gradients that come do not count: later ones are added to them.
    any_came, any_complete : bool
        A gradient of this step has come, maybe the first of several that are added up; one is complete.
    dropped : bool
        Gradients of this step were dropped, and no others have come since.
    overtaken : bool
        Another optimizer over some of the parameters was made since. This one, which may be dropped on one rank earlier
        than on another, sends nothing during backward any more.
    silent_steps : int
        Steps on end in which this rank had no gradient at all.
    order : dict
        Positions of the parameters, in the order in which their gradients came the first time.
    lock : threading.RLock
        Held while a gradient is reported.
    """

    def __init__(self, names: Sequence[str], passes: int) -> None:
        self._names, self._passes = list(names), passes
        self.lock = threading.RLock()
        self.order: dict[int, None] = {}  # keeps the order, and is looked up at every gradient
        self.paused = self.overtaken = self.dropped = False
        self.silent_steps = 0
        self.restart()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Return a context manager in which gradients do not count."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Sequence[str]) -> None:
        """Count the gradients of more parameters, which are complete in this step."""
        self._names += names
        self._counts += [self._passes] * len(names)

    def restart(self) -> None:
        """Begin another step, without gradients."""
        self._counts = [0] * len(self._names)
        self.any_came = self.any_complete = False

    def count_silent_step(self) -> bool:
        """Count a step if it had no gradient, after others with some; return True if a warning is due."""
        self.silent_steps = 0 if self.any_came or not self.order else self.silent_steps + 1
        return self.silent_steps == SILENT_STEPS

    def lacks(self, position: int) -> bool:
        """Return True if a gradient of this step has not come."""
        return not self._counts[position]

    def is_complete(self, position: int) -> bool:
        """Return True if all gradients of this step have come."""
        return self._counts[position] >= self._passes

    def complete(self, position: int, sent: bool) -> bool:
        """Count a gradient, and return True if it is complete; RuntimeError if it was, and is or may be `sent`."""
        self.order.setdefault(position)
        self.any_came = True
        if self.paused:
            return False
        self._counts[position] = count = self._counts[position] + 1
        if count > self._passes and sent:
            raise RuntimeError(
                f"the gradient of {self._names[position]!r} came once more after it was sent: call backward() "
                f"{'once' if self._passes == 1 else f'{self._passes} times'} between two steps; to accumulate "
                "gradients, call the others under `with optimizer.no_sync():`, or pass backward_passes_per_step=; if "
                "one backward() brings a gradient several times, as with reentrant checkpoints, pass overlap=False; "
                "drop an optimizer that is not to step any more; gradients that model.zero_grad() has dropped still "
                "count, so call optimizer.zero_grad() in its place"
            )
        complete = count >= self._passes
        self.any_complete |= complete
        return complete

    def late(self, position: int) -> RuntimeError:
        """Return the error for a gradient of a step whose gradients have been averaged: it would not be."""
        return RuntimeError(
            f"the gradient of {self._names[position]!r} came after the gradients of this step were averaged, by "
            "optimizer.synchronize() or, with overlap, by reading optimizer.param_groups: call every backward() of a "
            "step before them, or optimizer.zero_grad() to drop the step"
        )


class _Window(NamedTuple):
    """A part of a gradient, and the sum of its bits when it was sent."""

    name: str
    values: Tensor
    bits: Tensor


class SentGradients:
    """The gradients of one step that have been sent, or wait for the step in a bucket that is sent last.

    PyTorch counts changes that are made through a tensor, and ``p.grad = ...`` makes another one. Changes through
    ``.data``, NumPy or DLPack leave no trace but the values. So sums of the gradients' bits are compared: of all
    elements in steps 1, 2, 4, 8, ..., and in the other steps of one window, which moves from step to step. A loop that
    changes gradients too late does so from its first steps on.
    """

    def __init__(self) -> None:
        self._noted: dict[str, _Noted] = {}  # not sent; mostly without address
        self._sent: list[_Noted] = []
        self._windows: dict[str, _Window] = {}
        self._step, self._watches_all = 1, True  # in steps 1, 2, 4, 8, ...
        self._n_buckets, self._buckets_before = 0, 1

    def note(self, members: Sequence[NamedParameter], only_new: bool = False) -> None:
        """Note gradients that are complete: the loop must leave them alone until the step.

        only_new : changes of gradients that have been noted must not be lost.
        """
        noted, watches_all = self._noted, self._watches_all
        for member in members:
            gradient = member.parameter.grad
            if gradient is not None and not (only_new and member.name in noted):
                noted[member.name] = member, gradient, gradient._version, 0
                if watches_all and (address := _address_of(gradient)):
                    noted[member.name] = member, gradient, gradient._version, address
                    self._watch(member, gradient, whole=True)

    def add(self, members: Sequence[NamedParameter], mean: Tensor) -> None:
        """Watch the noted gradients of a bucket's parameters, which are sent now.

        Their `mean` is going to be written where gradients may lie that a loop has kept.
        """
        first, end = mean.data_ptr(), mean.data_ptr() + mean.nbytes
        there = list[_Noted]()
        for one in members:
            if one.name in self._noted:
                member, gradient, version, _ = self._noted.pop(one.name)
                # not by `_address_of`: as often as hooks are called, a call counts
                address = (gradient._values() if gradient.is_sparse else gradient).data_ptr()
                there.append((member, gradient, version, address))
        self._sent += there
        is_due = not self._watches_all and self._n_buckets == self._step % self._buckets_before
        self._n_buckets += 1
        if not (is_due or self._windows):
            return
        for member, _, _, address in there:
            if first <= address < end:
                self._windows.pop(member.name, None)
        there = [one for one in there if not first <= one[3] < end]
        if there and is_due:
            member, gradient, _, _ = there[self._step // self._buckets_before % len(there)]
            self._watch(member, gradient, whole=False)

    def release_unsent(self) -> None:
        """Let the loop change gradients that wait for the step: they are averaged as they are then."""
        for name in self._noted:
            self._windows.pop(name, None)
        self._noted.clear()

    def find_change(self) -> str:
        """Return the name of a gradient that was changed or replaced since it was sent, or an empty string."""
        for member, gradient, version, address in (*self._sent, *self._noted.values()):
            # views of a bucket share one count, and backward goes on with the others
            is_changed = gradient._version != version and not gradient._is_view()
            if is_changed or member.parameter.grad is not gradient or (address and _address_of(gradient) != address):
                return member.name
        by_device: dict[torch.device, list[_Window]] = {}
        for window in self._windows.values():
            by_device.setdefault(window.values.device, []).append(window)
        for windows in by_device.values():  # the host waits once for each device
            before = torch.stack([window.bits for window in windows])
            now = torch.stack([_sum_of_bits(window.values) for window in windows])
            if not torch.equal(before, now):
                return windows[int((before != now).nonzero()[0])].name
        return ""

    def clear(self) -> None:
        """Begin another step."""
        if self._sent or self._noted:
            self._step += 1
            self._watches_all = not self._step & (self._step - 1)
            self._buckets_before = max(1, self._n_buckets)
        self._n_buckets = 0
        self._noted.clear()
        self._sent.clear()
        self._windows.clear()

    def _watch(self, member: NamedParameter, gradient: Tensor, whole: bool) -> None:
        values = gradient._values() if gradient.is_sparse else gradient.detach()
        if not whole:
            if values.device.type != "cpu" or not values.is_contiguous():
                return  # the host would wait for the device in every step, or copy the whole gradient
            values = values.view(-1)
            start = self._step * WINDOW_ELEMENTS % values.numel()
            values = values[start : start + WINDOW_ELEMENTS]
        self._windows[member.name] = _Window(member.name, values, _sum_of_bits(values))


def _address_of(gradient: Tensor) -> int:
    # without a new tensor, as backward asks for each gradient's
    return (gradient._values() if gradient.is_sparse else gradient).data_ptr()


def _sum_of_bits(values: Tensor) -> Tensor:
    """Return the sum of the values' bits, read as integers of a length that depends on their place in memory."""
    in_word = 8 // values.element_size()
    whole = values.numel() // in_word * in_word
    if not values.is_contiguous() or values.storage_offset() % in_word or not whole:
        return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
    values = values.view(-1)
    words = values[:whole].view(torch.int64).sum()  # 7 times as fast as a sum of shorter integers
    return words if whole == values.numel() else words + _sum_of_bits(values[whole:])
