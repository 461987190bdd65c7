"""Choosers of places of vectors on a device; what they find has the bits of `mpicomp.reducers.choosers`."""

from __future__ import annotations

from collections.abc import Iterator

from collectives import Communicator
from collectives.progress.polling import done
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.top_k import pack_indices, unpack_indices
from mpicomp.feedback.memory import Memory
from mpicomp.feedback.memory_device import DeviceMemory
from mpicomp.reducers.choosers import Chooser, LeaderChoice, ToldPlaces, TrueChoice


class DeviceLeaderChoice(ToldPlaces):
    """See `LeaderChoice`: the device looks at the whole vector at once, and the host packs and unpacks indices."""

    _memory: DeviceMemory

    def _look(self, call: VectorCall) -> Iterator[bool]:
        memory = self._memory
        if self._leads:
            memory.find(call.values, memory.residual)
            yield from done(call, memory.fetch_indices())
        else:
            memory.check_all(call.values, memory.residual)

    def _told(self) -> None:
        if not self._leads:
            self._memory.place_all()

    def encode(self, piece: int) -> None:
        """See `Payload`."""
        if self._leads:
            pack_indices(self._memory.indices[self._parts[piece].values], self._planes[piece])

    def finish(self, piece: int) -> None:
        """See `Payload`."""
        if not self._leads:
            unpack_indices(self._planes[piece], self._memory.indices[self._parts[piece].values])


class DeviceTrueChoice(Chooser):
    """See `TrueChoice`: the vector with the residual crosses to the host, and the mean crosses back."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory, self._mean = memory, memory.mirror()

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """See `Chooser`."""
        memory, mean = self._memory, self._mean
        memory.begin()
        memory.add(call.values, mean.there)
        memory.check_all(mean.there)
        yield from done(call, mean.fetch())
        host = mean.here
        yield from call.group.dense_steps(call, host, host.dtype.name, True, host, call.traffic)
        mean.deliver()
        memory.find(mean.there, None)


def leader_choice(comm: Communicator, memory: Memory) -> ToldPlaces:
    """The largest of one rank's, wherever its vectors are."""
    return DeviceLeaderChoice(comm, memory) if isinstance(memory, DeviceMemory) else LeaderChoice(comm, memory)


def true_choice(memory: Memory) -> Chooser:
    """The largest of the exact mean, wherever vectors are."""
    return DeviceTrueChoice(memory) if isinstance(memory, DeviceMemory) else TrueChoice(memory)
