"""Arrays whose memory does not hold their values, or must not be written: refused before anything moves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from collectives import Communicator, arrays
from mpicomp import Dense, Marsit
from tests.fake_device import FakeArray, FakeDevice

N = 8


class Frozen:
    """An array that must not be written, as its library says by `flag`."""

    def __init__(self, flag: str) -> None:
        self.values, self.flag = np.zeros(N, np.float32), flag
        self.shape, self.dtype = self.values.shape, self.values.dtype
        read_only = self.values.view()
        read_only.flags.writeable = False
        self.read_only = read_only
        if flag == "__array_interface__":
            self.__array_interface__ = read_only.__array_interface__
        elif flag == "__array__":
            self.__array__ = lambda *args, **options: read_only

    def __dlpack__(self, max_version: tuple[int, int] | None = None) -> Any:
        if self.flag == "max_version":
            return self.read_only.__dlpack__(max_version=max_version)
        return self.values.__dlpack__()  # the version before 1, which cannot tell

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


class Copied(Frozen):
    """An array that hands out a copy."""

    def __init__(self) -> None:
        super().__init__("copy")

    def __dlpack__(self, max_version: tuple[int, int] | None = None) -> Any:
        return self.values.__dlpack__(max_version=max_version, copy=True)


class Broken(Frozen):
    """An array of a library that fails in its own way."""

    def __init__(self) -> None:
        super().__init__("broken")

    def __dlpack__(self, **options: Any) -> Any:
        raise LookupError("no such buffer\nand more")


def ones() -> torch.Tensor:
    return torch.ones(N)


def freed() -> torch.Tensor:
    tensor = ones()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return ones()


def batched() -> torch.Tensor:
    """A tensor as functions under vmap see it."""
    seen: list[torch.Tensor] = []
    torch.func.vmap(lambda x: seen.append(x) or x)(torch.ones(2, N))
    return seen[0]


# Refused whether they are read or written.
NEVER: dict[str, tuple[Callable[[], Any], str]] = {
    "negated": (lambda: torch._neg_view(ones()), r"a negated view .*: pass tensor\.resolve_neg\(\)"),
    "imaginary part": (lambda: torch.ones(1, dtype=torch.cfloat).conj().imag, "negated view"),
    "conjugated": (lambda: torch.ones(N, dtype=torch.cfloat).conj(), "conjugate bit"),
    "masked": (lambda: np.ma.masked_array(np.ones(N, np.float32), [0, 1] * 4), r"masked.*: pass array\.filled\(0\)"),
    "no mask": (lambda: np.ma.masked_array(np.ones(N, np.float32)), "masked"),
    "meta": (lambda: torch.ones(N, device="meta"), "on device meta, where it has a shape and no values: make it where"),
    "fake": (fake, "the FakeTensor has no memory of its own.*: pass a dense tensor"),
    "functional": (lambda: torch._to_functional_tensor(ones()), "no memory of its own"),
    "wrapping": (lambda: TwoTensor(ones(), ones()), "the TwoTensor has no memory of its own"),
    "of zeros": (lambda: torch._efficientzerotensor(N), "no memory of its own"),
    "freed": (freed, "no memory of its own"),
    "batched": (batched, "not plain memory"),
    "quantized": (lambda: torch.quantize_per_tensor(ones(), 0.1, 0, torch.quint8), "not plain memory"),
    "sparse": (lambda: ones().to_sparse(), "not plain memory"),
    "nested": (lambda: torch.nested.nested_tensor([ones()], layout=torch.jagged), "not plain memory"),
    "opaque": (lambda: ones().to_mkldnn(), "not plain memory"),
    "a leaf": (lambda: torch.ones(N, requires_grad=True), r"requires grad.*: pass tensor\.detach\(\)"),
    "zero strides": (lambda: torch.ones(1).expand(N), "not contiguous"),
    "one element for all": (lambda: np.broadcast_to(np.float32(1), (N,)), "not contiguous"),
    "structured": (lambda: np.zeros(N, [("a", "f4")]), "elements of type"),
    "byte-swapped": (lambda: np.ones(N, ">f4"), "byte-swapped float32"),
    "8 bits": (lambda: ones().to(torch.float8_e4m3fn), "elements of type torch.float8_e4m3fn"),
    "failing": (Broken, r"the Broken is not plain memory \(no such buffer\): pass"),
    "a list": (lambda: [1.0] * N, "list: pass a NumPy array"),
}

READ: dict[str, Callable[[Communicator, Any], Any]] = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "iallreduce": lambda comm, x: comm.iallreduce(x),
    "allgather": lambda comm, x: comm.allgather(x),
    "isend": lambda comm, x: comm.isend(x, 0),
    "aggregate": lambda comm, x: Dense().start(comm, N).aggregate(x),
    "begin": lambda comm, x: Dense().start(comm, N).begin(x),
}
WRITTEN: dict[str, Callable[[Communicator, Any], Any]] = {
    "broadcast": lambda comm, x: comm.broadcast(x),
    "irecv": lambda comm, x: comm.irecv(x, 0),
    "allreduce": lambda comm, x: comm.allreduce(np.ones(N, np.float32), out=x),
    "iallreduce": lambda comm, x: comm.iallreduce(np.ones(N, np.float32), out=x),
    "aggregate": lambda comm, x: Dense().start(comm, N).aggregate(np.ones(N, np.float32), x),
}


@pytest.mark.parametrize("kind", NEVER)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_plain_memory_is_refused_by_every_call(kind: str, comm: Communicator) -> None:
    make, told = NEVER[kind]
    odd = make()
    for call in (*READ.values(), *WRITTEN.values()):
        with pytest.raises((TypeError, ValueError), match=f"^rank 0 of 1, .*{told}"):
            call(comm, odd)
    assert comm.allreduce(np.ones(3)).sum() == 3


@pytest.mark.parametrize("flag", ["max_version", "__array_interface__", "__array__"])
def test_what_must_not_be_written_is_read_and_never_written(flag: str, comm: Communicator) -> None:
    frozen = Frozen(flag)
    for call in WRITTEN.values():
        with pytest.raises(ValueError, match="read-only"):
            call(comm, frozen)
    assert not frozen.values.any()
    out = np.ones(N, np.float32)
    assert not comm.allreduce(frozen, out=out).any()


def test_a_copy_is_no_place_for_a_result(comm: Communicator) -> None:
    for call in WRITTEN.values():
        with pytest.raises(ValueError, match="read-only"):
            call(comm, Copied())


class Unchanging(Frozen):
    """An array of a library whose arrays never change, which makes others."""

    device = None

    def __init__(self) -> None:
        super().__init__("__array__")

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(empty=lambda shape, dtype, device: Unchanging())


@pytest.mark.parametrize("call", ["allreduce", "iallreduce", "allgather", "aggregate", "begin"])
def test_no_result_is_made_of_arrays_that_never_change(call: str, comm: Communicator) -> None:
    told = "no other Unchanging can be made for the result, as its kind cannot be written: pass out"
    with pytest.raises(TypeError, match=told):
        READ[call](comm, Unchanging())


def test_arrays_of_jax_on_a_gpu_are_not_written(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arrays.MAKERS, arrays.CUDA, {0: FakeDevice()}.__getitem__)
    there = FakeArray(np.zeros(N, np.float32))
    assert comm.broadcast(there) is there
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(Array=FakeArray))
    for call in WRITTEN.values():
        with pytest.raises(ValueError, match="read-only"):
            call(comm, there)


class Labelled(np.ndarray[Any, Any]):
    """An array of a class of the user's."""


PLAIN: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "a matrix": np.matrix,
    "a subclass": lambda array: array.view(Labelled),
    "a tensor's subclass": lambda array: torch.from_numpy(array).as_subclass(type("Own", (torch.Tensor,), {})),
    "a frozen parameter": lambda array: torch.nn.Parameter(torch.from_numpy(array), requires_grad=False),
    "of inference": torch.inference_mode()(lambda array: torch.from_numpy(array) + 0),
    "resolved": lambda array: torch._neg_view(torch.from_numpy(-array)).resolve_neg(),
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_other_classes_of_plain_memory_are_taken_and_written(kind: str, comm: Communicator) -> None:
    want = np.arange(N, dtype=np.float32)
    x, out = PLAIN[kind](want.copy()), PLAIN[kind](np.zeros(N, np.float32))
    for result in (comm.allreduce(x), comm.allreduce(x, out=out), Dense().start(comm, N).aggregate(x)):
        np.testing.assert_array_equal(np.asarray(result).reshape(-1), want)
    for method in (Dense(), Marsit()):
        result = method.start(comm, N).aggregate(x, PLAIN[kind](np.zeros(N, np.float32)))
        np.testing.assert_array_equal(np.asarray(result).reshape(-1), want)
    sending, received = comm.isend(x, 0), PLAIN[kind](np.zeros(N, np.float32))
    comm.recv(received, 0)
    sending.wait()
    np.testing.assert_array_equal(np.asarray(received).reshape(-1), want)
