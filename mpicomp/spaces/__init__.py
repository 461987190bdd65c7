"""Memory spaces: where a method keeps its vectors, with the kernels and copies that are made there."""

from __future__ import annotations

from collectives.arrays import HOST_DEVICE, Device, named
from mpicomp.spaces.device_space import DeviceSpace
from mpicomp.spaces.host_space import HOST, Space

__all__ = ["HOST", "DeviceSpace", "Space", "space_at", "space_of"]


def space_of(place: Space | Device) -> Space:
    """Return the memory space of a device; a space is its own."""
    return place if isinstance(place, Space) else HOST if place is HOST_DEVICE else DeviceSpace(place)


def space_at(name: str) -> Space:
    """Return the memory space of "cpu" or of a GPU, such as "cuda:1"; raises ValueError if there is none."""
    return space_of(named(name))
