"""Stand-in for a group of NCCL: ranks are threads with a `FakeDevice` each, which exchange vectors as part of its work.

A device waits with an exchange, and with all later work, until the other ranks' devices have come to it. What an
exchange takes lands when the stream is told to wait for it, and its operands must be on the device that works.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch

from mpicomp.nodes import torch_group
from mpicomp.nodes.torch_group import Gpu
from tests.fake_device import FakeDevice, NotReady, _current, fake_devices, owner_of


class Mail:
    """Parts that the ranks of a group have sent, by the number of the exchange, and the kinds of all exchanges."""

    def __init__(self) -> None:
        self.parts: dict[int, dict[int, list[torch.Tensor]]] = defaultdict(dict)
        self.kinds: dict[int, str] = {}


class Landing:
    """Stand in for `torch.distributed.Work`."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs

    def wait(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)


class FakeBackend:
    """Stand in for `torch.distributed.ProcessGroupNCCL`."""

    def __init__(self, mail: Mail, rank: int, size: int, order: tuple[int, ...] | None = None) -> None:
        self._mail, self._rank, self._size, self._count = mail, rank, size, 0
        self._place = rank if order is None else order[rank]
        self.is_shut = False

    def _begin(self, kind: str, *operands: torch.Tensor) -> dict[int, list[torch.Tensor]]:
        here = getattr(_current, "device", None)
        assert here is not None, "the exchange is not part of the work of a device"
        # arrays of tests have no owner
        assert all(owner_of(one) in (here, None) for one in operands), "an operand is elsewhere"
        assert self._mail.kinds.setdefault(self._count, kind) == kind, "ranks make exchanges in different orders"
        return self._mail.parts[self._count]

    def alltoall_base(self, target: Any, source: Any, taken: Any, sent: Any, options: Any) -> Landing:
        parts = self._begin("alltoall", target, source)
        if self._place not in parts:
            parts[self._place] = [one.clone() for one in torch.split(source, sent)]
        if len(parts) < self._size:
            raise NotReady
        self._count += 1
        rows = torch.split(target, taken)
        return Landing([(row, parts[rank][self._place]) for rank, row in enumerate(rows)])

    def broadcast(self, tensors: Any, options: Any) -> Landing:
        parts, root = self._begin(f"broadcast from {options.rootRank}", *tensors), options.rootRank
        if self._place == root:
            parts[root] = [tensors[0].clone()]
        elif root not in parts:
            raise NotReady
        self._count += 1
        return Landing([] if self._place == root else [(tensors[0], parts[root][0])])

    def shutdown(self) -> None:
        self.is_shut = True


class FakeNCCL:
    """NCCL and GPUs of ranks that are threads; each thread sets `here.rank` before it starts an aggregator.

    Attributes
    ----------
    devices : dict of int to FakeDevice
    backends : list of FakeBackend
    gpus : dict of int to Gpu
        Of ranks whose current GPU is not that of their number.
    order : tuple of int or None
        Places that ranks of a node get in their group, if they are not their own.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        self.devices: dict[int, FakeDevice] = fake_devices(patch)
        self.backends: list[FakeBackend] = []
        self.gpus: dict[int, Gpu] = {}
        self.order: tuple[int, ...] | None = None
        self._mail: dict[str, Mail] = defaultdict(Mail)
        patch.setattr(torch_group, "require_backend", lambda kind: None)
        patch.setattr(torch_group, "current_gpu", self._current)
        patch.setattr(torch_group, "make_backend", self._make)

    def _current(self) -> Gpu:
        rank = self.here.rank
        return self.gpus.get(rank) or Gpu(f"cuda:{rank}", f"GPU {rank}")

    def _make(self, kind: str, store: Any, rank: int, size: int, timeout_s: float) -> FakeBackend:
        assert kind == "nccl"
        backend = FakeBackend(self._mail[store.path], rank, size, self.order)
        self.backends.append(backend)
        return backend
