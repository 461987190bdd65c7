"""Flag of a step: all that it has checked is finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from collectives.annotations import Array, Bytes, Testable, override
from collectives.arrays import Device
from mpicomp import kernels
from mpicomp.spaces.mirror import DeviceMirror


class FiniteFlag:
    """Flag that stays set while everything that a step has checked is finite."""

    _is_set = True

    def __bool__(self) -> bool:
        return self._is_set

    @property
    def landed(self) -> bool:
        """The device's flag as the last copy has found it; later kernels may have cleared it. The host's own flag."""
        return self._is_set

    def reset(self) -> None:
        """Set the flag for another step."""
        self._is_set = True

    def clear_unless(self, finite: Any) -> None:
        """Clear the flag if `finite`, a bool or a bool[] on a device, is False. Called as one of the kernels.

        finite : None where the caller has not looked.
        """
        if finite is not None and not finite:  # only ever cleared: other threads do the same
            self._is_set = False

    def check(self, kernel: Callable[..., Any], *arguments: Any) -> Any:
        """Call a kernel, or a codec, that returns whether all is finite; return that, and clear the flag if it is not.

        A kernel on a device clears this flag itself.
        """
        finite = kernel(*arguments)
        self.clear_unless(finite)
        return finite

    def fetch(self) -> Testable | None:
        """Copy the flag to the host; returns a handle, or None where it is there."""
        return None


class DeviceFlag(FiniteFlag):
    """Flag that kernels on a device clear, which is copied to the host behind them.

    Parameters
    ----------
    device : Device
    memory : (uint8[1] on the device, uint8[1] of the host), optional
        Memory that the flag has in messages of its owner, who copies it. None: it has memory of its own.
    """

    def __init__(self, device: Device, memory: tuple[Array, Bytes] | None = None) -> None:
        self._device = device
        self._mirror: DeviceMirror | None = None
        if memory is None:
            self._mirror = DeviceMirror(device, device.zeros(1, "uint8"))
            memory = self._mirror.there, self._mirror.here
        self._there, self._here = memory
        self._here[0] = 1  # pinned memory is undefined, and a flag that no step has used is never copied
        self._is_known = False  # the host has seen the device's flag since it was last used

    @override
    def __bool__(self) -> bool:
        self._is_known = True
        return bool(self._here[0])

    @property
    @override
    def landed(self) -> bool:
        return bool(self._here[0])

    @override
    def reset(self) -> None:
        # a launch that can be spared as long as everything is finite
        if not (self._is_known and self._here[0]):
            self._device.run(partial(self._there.fill_, 1))
        self._is_known = False

    @override
    def clear_unless(self, finite: Any) -> None:
        # a bool is that of a codec which has raised nothing
        if finite is not None and not isinstance(finite, bool) and finite.data_ptr() != self._there.data_ptr():
            self._there.mul_(finite)

    @override
    def check(self, kernel: Callable[..., Any], *arguments: Any) -> Any:
        return kernels.of("cuda").arrays.call_with_flag(self._there, super().check, kernel, *arguments)

    @override
    def fetch(self) -> Testable | None:
        return None if self._mirror is None else self._mirror.fetch()
