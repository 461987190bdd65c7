"""Flag of a step: all that it has checked is finite, on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from collectives.annotations import Array, Bytes, Testable
from collectives.arrays import Device
from mpicomp import kernels
from mpicomp.feedback.mirror import Mirror


class FiniteFlag:
    """Flag that stays set while everything that a step has checked is finite.

    On a device kernels find that out: they clear a flag there, which is copied to the host behind them.

    Parameters
    ----------
    device : Device
    memory : (uint8[1] on the device, uint8[1] of the host), optional
        Memory that the flag has in messages of its owner, who copies it. None: it has memory of its own.
    """

    def __init__(self, device: Device, memory: tuple[Array, Bytes] | None = None) -> None:
        self._device, self._is_set = device, True
        self._mirror: Mirror | None = None
        if device.name != "cpu":
            if memory is None:
                self._mirror = Mirror(device, device.zeros(1, "uint8"))
                memory = self._mirror.there, self._mirror.here
            self._there, self._here = memory
            self._here[0] = 1  # pinned memory is undefined, and a flag that no step has used is never copied
        self._on_host = device.name == "cpu"
        self._is_known = False  # the host has seen the device's flag since it was last used

    def __bool__(self) -> bool:
        if self._on_host:
            return self._is_set
        self._is_known = True
        return bool(self._here[0])

    @property
    def landed(self) -> bool:
        """The device's flag as the last copy has found it; later kernels may have cleared it. The host's own flag."""
        return self._is_set if self._on_host else bool(self._here[0])

    def reset(self) -> None:
        """Set the flag for another step."""
        self._is_set = True
        if not self._on_host:
            # a launch that can be spared as long as everything is finite
            if not (self._is_known and self._here[0]):
                self._device.run(partial(self._there.fill_, 1))
            self._is_known = False

    def clear_unless(self, finite: Any) -> None:
        """Clear the flag if `finite`, a bool or a bool[] on the device, is False. Called as one of the kernels.

        finite : None where the caller has not looked.
        """
        if finite is None:
            return
        if isinstance(finite, bool):
            if not finite:  # only ever cleared: other threads do the same
                self._is_set = False
        elif self._on_host:
            if not bool(finite):
                self._is_set = False
        elif finite.data_ptr() != self._there.data_ptr():
            self._there.mul_(finite)

    def check(self, kernel: Callable[..., Any], *arguments: Any) -> Any:
        """Call a kernel, or a codec, that returns whether all is finite; return that, and clear the flag if it is not.

        A kernel on a device clears this flag itself.
        """
        if self._on_host:
            finite = kernel(*arguments)
        else:
            with kernels.of("cuda").arrays.clearing(self._there):
                finite = kernel(*arguments)
        self.clear_unless(finite)
        return finite

    def fetch(self) -> Testable | None:
        """Copy the flag to the host; returns a handle, or None where it is there."""
        return None if self._mirror is None else self._mirror.fetch()
