"""Sums among the ranks of a node by a group of torch.distributed: in the host's memory, or on GPUs.

An all-to-all takes each shard to its owner, who adds the parts in the order of local ranks, so that the bits are those
of the other ways; a reduce-scatter of NCCL would add in an order of its own. Collectives of a group must start in one
order on all of its ranks, so calls of a communicator take their steps one after the other.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np

from collectives.annotations import AnyArray, Array, FloatArray, override
from collectives.arrays.elements import aligned_empty
from collectives.arrays.torch_device import combine, divide
from collectives.execution.call import Steps
from collectives.execution.staged import until_queued
from collectives.progress.polling import done, until
from mpicomp.aggregator.call import VectorCall
from mpicomp.feedback.base import narrow_into
from mpicomp.kernels import of
from mpicomp.nodes.local_sum import BAD, FINE, AgreeingSum, SumTerms
from mpicomp.nodes.torch_group import TorchGroup
from mpicomp.spaces import DeviceSpace
from mpicomp.spaces.finite_flag import DeviceFlag


class HostGroupSum(AgreeingSum):
    """Sums by a group in the host's memory, such as one of Gloo. Parameters as in `LocalSum`, and the group."""

    def __init__(self, terms: SumTerms, group: TorchGroup) -> None:
        super().__init__(terms)
        self._group = group
        self._sent, self._taken = [len(shard) for shard in self.shards], [len(self.own)] * self._size
        self.result = np.empty(len(self.own), self.spec.stored)
        self._landing = aligned_empty(sum(self._taken), self.spec.compute)

    @override
    def reduce(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        yield from call.turn()
        call.describe = lambda: f"{self.local.here}: not all of them come to the exchange of shards"
        work = self._group.exchange_arrays(values, self._landing, self._sent, self._taken)
        call.owners = (*call.owners, work, values, self._landing)
        yield from until(work, call)
        return (yield from self._add_shards(call, [*self._landing.reshape(self._size, -1)]))

    @override
    def take(self, call: VectorCall, values: FloatArray) -> Generator[bool, None, bool]:
        yield from call.turn()
        return (yield from super().take(call, values))

    @override
    def _spread(self, call: VectorCall, out: AnyArray) -> Steps:
        out[self.own.start : self.own.stop] = self.result
        call.describe = lambda: f"{self.local.here}: not all of them come to the exchange of results"
        parts = [(out[shard.start : shard.stop], root) for root, shard in enumerate(self.shards) if shard]
        works = [self._group.broadcast_array(part, root) for part, root in parts]
        call.owners = (*call.owners, works, out)
        for work in works:
            yield from until(work, call)


class DeviceGroupSum(AgreeingSum):
    """Sums by a group on the devices of the ranks, such as one of NCCL. Parameters as in `HostGroupSum`.

    Vectors, sums and results stay on the device. The exchanges are part of its work, in the order of its stream.
    """

    sums: Any
    result: Any

    def __init__(self, terms: SumTerms, group: TorchGroup) -> None:
        super().__init__(terms)
        spec, device, own, compute = self.spec, group.device, len(self.own), str(self.spec.compute)
        self._group, self._device = group, device
        self._sent, self._taken = [len(shard) for shard in self.shards], [own] * self._size
        self.sums, self.result = device.zeros(own, compute), device.zeros(own, spec.dtype)
        if self.is_mean and not spec.is_narrow:
            self.sums = self.result
        self._landing = device.zeros(sum(self._taken), compute)
        self._ranks = device.zeros(1, compute)
        device.run(partial(self._ranks.fill_, float(terms.divisor)))
        self._finite = DeviceFlag(device)

    @override
    def reduce(self, call: VectorCall, values: Array) -> Generator[bool, None, bool]:
        yield from call.turn()
        self._finite.reset()
        exchange = self._group.queue_exchange
        self._device.run(partial(exchange, values, self._landing, self._sent, self._taken))
        self._device.run(self._add_up)
        call.describe = lambda: f"{self.local.here}: {self._device.name} does not end the exchange of shards"
        yield from done(call, self._finite.fetch())
        return (yield from self._agree(call, FINE if self._finite else BAD)) == FINE

    @override
    def take(self, call: VectorCall, values: Array) -> Generator[bool, None, bool]:
        yield from call.turn()
        finite = yield from self.all_finite(call, values[self.own.start : self.own.stop])
        self._device.run(partial(self._take_share, values))
        return (yield from self._begin(call, FINE if finite else BAD)) == FINE

    def _take_share(self, values: Array) -> None:
        self.sums.copy_(values[self.own.start : self.own.stop])
        divide(self.sums, self._ranks)

    def _add_up(self) -> None:
        parts = self._landing.view(self._size, -1)
        if self._size == 1:
            self.sums.copy_(parts[0])
        else:
            combine("sum", parts[0], parts[1], self.sums)
        for part in parts[2:]:
            combine("sum", self.sums, part, self.sums)
        divide(self.sums, self._ranks)
        self._finite.check(of("cuda").sign.all_finite, self.sums)

    @override
    def _spread(self, call: VectorCall, out: Array) -> Steps:
        device, own = self._device, self.own
        device.run(partial(out[own.start : own.stop].copy_, self.result))
        for root, shard in enumerate(self.shards):
            if shard:
                device.run(partial(self._group.queue_broadcast, out[shard.start : shard.stop], root))
        call.describe = lambda: f"{self.local.here}: {device.name} does not end the exchange of results"
        yield from until_queued(call, device.done())

    @override
    def spoil(self) -> None:
        self._device.run(partial(self.sums[:1].fill_, float("nan")))

    @override
    def clear(self) -> None:
        self._device.run(self.result.zero_)

    @override
    def keep(self, call: VectorCall, sums: Array) -> Generator[bool, None, bool]:
        if not self.spec.is_narrow:
            if sums is not self.result:
                self._device.run(partial(self.result.copy_, sums))
            return sums is self.sums or (yield from self.all_finite(call, sums))
        self._finite.reset()
        words = DeviceSpace(self._device).words(self.result)
        self._device.run(partial(self._finite.check, narrow_into, sums, self.spec.dtype, words))
        yield from done(call, self._finite.fetch())
        return bool(self._finite)

    @override
    def all_finite(self, call: VectorCall, values: Array) -> Generator[bool, None, bool]:
        self._finite.reset()
        self._device.run(partial(self._finite.check, of("cuda").sign.all_finite, values))
        yield from done(call, self._finite.fetch())
        return bool(self._finite)
