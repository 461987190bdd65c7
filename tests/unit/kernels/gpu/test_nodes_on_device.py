"""`PerNode(local="nccl")`: sums of a node and encoding on devices have the bits of ranks in the host's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp import QSGD, Dense, DoubleSqueeze, LocalTopK, Marsit, NonFiniteGradient, PerNode
from mpicomp.nodes.torch_group import Gpu
from tests.fake_device import FakeArray, FakeStream
from tests.fake_group import FakeNCCL
from tests.unit.kernels.gpu.on_device import HAS_GPU, bits, vector

pytestmark = pytest.mark.skipif(HAS_GPU, reason="needs the fake device: TRITON_INTERPRET=1")

N, STEPS = 2 * 4096 + 777, 3
LAYOUTS = {"2x2": (4, 2), "2+1": (3, 2), "1x3": (3, 3)}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNCCL:
    return FakeNCCL(monkeypatch)


def on_host(method: Any, ranks: int, per: int, dtype: str) -> list[Any]:
    def work(comm: Communicator) -> list[Any]:
        aggregator = PerNode(method, local="ring").start(comm, N, dtype=dtype)
        results = [bits(aggregator.aggregate(given(vector(comm.rank, step, N, dtype)))) for step in range(STEPS)]
        return [*results, *arrays_of(aggregator.state_dict())]

    def given(x: Any) -> Any:
        import torch

        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else x

    return run_local(ranks, work, ranks_per_node=per)


def arrays_of(state: Any) -> list[Any]:
    return [np.asarray(state[key]) for key in sorted(state) if key != "method"]


def begun(nccl: FakeNCCL, comm: Communicator, method: Any, dtype: str = "float32", number: int = 0) -> Any:
    nccl.here.rank = comm.rank
    return PerNode(method, local="nccl").start(comm, N, dtype=dtype, vector_id=number, device=f"cuda:{comm.rank}")


@pytest.mark.parametrize(
    ("method", "dtype", "layout"),
    [
        *((Marsit(full_precision_every=2), "float32", layout) for layout in LAYOUTS),
        (Marsit(full_precision_every=None, residual="paper"), "bfloat16", "2x2"),
        (DoubleSqueeze(), "float16", "2+1"),
        (DoubleSqueeze(), "float16", "1x3"),
        (QSGD(), "float32", "2+1"),
        (LocalTopK(rate=10), "float64", "2x2"),
    ],
    ids=str,
)
def test_bits_are_those_of_the_host(method: Any, dtype: str, layout: str, nccl: FakeNCCL) -> None:
    ranks, per = LAYOUTS[layout]

    def work(comm: Communicator) -> list[Any]:
        aggregator, results = begun(nccl, comm, method, dtype), list[Any]()
        for step in range(STEPS):
            stream = FakeStream() if step % 2 else None
            x = FakeArray(vector(comm.rank, step, N, dtype), dtype, comm.rank)
            result = aggregator.aggregate(x, stream=stream)
            if stream is not None:
                stream.reach()
            results.append(bits(result))
        return [*results, *arrays_of(aggregator.state_dict())]

    for found, expected in zip(
        run_local(ranks, work, ranks_per_node=per), on_host(method, ranks, per, dtype), strict=True
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert all(backend.is_shut for backend in nccl.backends)


def test_a_rank_encodes_and_copies_its_shard_alone(nccl: FakeNCCL) -> None:
    def work(comm: Communicator) -> int:
        aggregator, copied = begun(nccl, comm, Marsit(full_precision_every=None)), nccl.devices[comm.rank].copied
        for step in range(2):
            copied.clear()
            aggregator.aggregate(FakeArray(vector(comm.rank, step, N), index=comm.rank))
        return sum(copied)

    shard = 5120  # at most, of two shards that begin at multiples of 4096
    signs, reports, scales, flag = 2 * shard // 8, 2 * 16, 48, 1
    assert max(run_local(4, work, ranks_per_node=2)) <= signs + reports + scales + flag


def test_calls_in_flight_exchange_in_one_order_whatever_order_ranks_wait_in(nccl: FakeNCCL) -> None:
    def work(comm: Communicator) -> list[Any]:
        aggregators = [begun(nccl, comm, Marsit(full_precision_every=None), number=number) for number in range(3)]
        handles = [one.begin(FakeArray(vector(comm.rank, 0, N), index=comm.rank)) for one in aggregators]
        order = (2, 0, 1) if comm.rank % 2 else (1, 2, 0)
        results = {number: bits(handles[number].wait(FakeStream(eager=True))) for number in order}
        return [results[number] for number in range(3)]

    found = run_local(4, work, ranks_per_node=2)
    np.testing.assert_array_equal(found, [found[0]] * 4)


@pytest.mark.parametrize("per", [2, 4])
def test_nan_is_an_error_on_all_ranks_and_nothing_is_lost(per: int, nccl: FakeNCCL) -> None:
    method = Marsit(full_precision_every=None, transactional=True)

    def work(comm: Communicator) -> list[Any]:
        aggregator = begun(nccl, comm, method)
        bad = vector(comm.rank, 1, N)
        bad[-1] = np.nan if comm.rank == 2 else bad[-1]
        results = [bits(aggregator.aggregate(FakeArray(vector(comm.rank, 0, N), index=comm.rank)))]
        with pytest.raises(NonFiniteGradient, match="from rank 2;"):
            aggregator.aggregate(FakeArray(bad, index=comm.rank), stream=FakeStream())
        return [*results, bits(aggregator.aggregate(FakeArray(vector(comm.rank, 1, N), index=comm.rank)))]

    for found, expected in zip(run_local(4, work, ranks_per_node=per), on_host(method, 4, per, "float32"), strict=True):
        np.testing.assert_array_equal(found, expected[:2])


@pytest.mark.parametrize("per", [2, 3])
def test_steps_with_nan_are_skipped_by_all_ranks(per: int, nccl: FakeNCCL) -> None:
    def work(comm: Communicator) -> list[Any]:
        aggregator, x = begun(nccl, comm, Marsit(None, nonfinite="skip"), "float16"), vector(comm.rank, 0, N, "float16")
        x[0] = np.inf if comm.rank == 1 else x[0]
        return [
            bits(aggregator.aggregate(FakeArray(one, "float16", comm.rank)))
            for one in (x, vector(comm.rank, 1, N, "float16"))
        ]

    found = run_local(3, work, ranks_per_node=per)
    np.testing.assert_array_equal(found, [found[0]] * 3)
    assert not found[0][0].any()
    assert found[0][1].any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_single_node_adds_pending_errors_and_notices_that_16_bits_overflow(dtype: str, nccl: FakeNCCL) -> None:
    errors = np.random.default_rng(0).standard_normal(N).astype(np.float32)

    def resume(comm: Communicator) -> Any:
        aggregator = begun(nccl, comm, LocalTopK(rate=10), dtype)
        state = aggregator.state_dict()
        shard = slice(*state["shard"])
        zeros, large = np.zeros(N, dtype), np.full(N, 6e4, dtype)
        if dtype == "float16":
            aggregator.load_state_dict(state | {"residual": np.full(N, 6e4, np.float32)[shard]})
            with pytest.raises(NonFiniteGradient, match="overflow"):
                aggregator.aggregate(FakeArray(large, dtype, comm.rank))
        aggregator.load_state_dict(state | {"residual": errors[shard]})
        return bits(aggregator.aggregate(FakeArray(zeros, dtype, comm.rank))).view(dtype)

    for found in run_local(2, resume, ranks_per_node=2):
        np.testing.assert_array_equal(found, errors.astype(dtype))


# Errors ---------------------------------------------------------------------------------------------------------------


def refused(nccl: FakeNCCL, told: str, ranks: int = 4) -> None:
    """Fail unless all ranks raise this error, and can go on in another way."""

    def work(comm: Communicator) -> Any:
        for _ in range(2):
            with pytest.raises(ValueError, match=told) as raised:
                begun(nccl, comm, Marsit())
            assert f"rank {comm.rank} of {ranks}: local='nccl' cannot be used: " in str(raised.value)
            assert str(raised.value).endswith("; or pass local='auto'")
        return PerNode(Dense()).start(comm, 3).aggregate(np.full(3, comm.rank, np.float32))

    for found in run_local(ranks, work, ranks_per_node=2):
        np.testing.assert_array_equal(found, (ranks - 1) / 2)


def test_a_rank_without_a_gpu_is_an_error_on_all_ranks(nccl: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicomp.nodes import torch_group

    find = torch_group.current_gpu

    def found() -> Gpu:
        if nccl.here.rank == 2:
            raise ValueError("PyTorch finds no GPU, and NCCL joins GPUs alone")
        return find()

    monkeypatch.setattr(torch_group, "current_gpu", found)
    refused(nccl, "on rank 2, PyTorch finds no GPU")


def test_two_ranks_of_a_node_with_one_gpu_are_an_error_on_all_ranks(nccl: FakeNCCL) -> None:
    nccl.gpus[3] = Gpu("cuda:2", "GPU 2")
    refused(nccl, r"ranks 2 and 3 of one node have the same GPU, cuda:2; call torch.cuda.set_device\(comm.local_rank\)")


def test_gpus_of_two_nodes_may_have_one_name(nccl: FakeNCCL) -> None:
    nccl.gpus |= {2: Gpu("cuda:2", "GPU 0"), 3: Gpu("cuda:3", "")}
    run_local(4, lambda comm: begun(nccl, comm, Marsit()), ranks_per_node=2)


def test_a_group_that_does_not_match_the_node_is_an_error_on_all_ranks(nccl: FakeNCCL) -> None:
    nccl.order = (1, 0)
    refused(nccl, "on rank 0, the group joins ranks 1, 0, and the node has ranks 0-1")
    assert all(backend.is_shut for backend in nccl.backends)


def test_vectors_in_memory_of_the_host_are_refused(nccl: FakeNCCL) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"encoded on the CPU: pass device='cuda', or local='auto'"):
            PerNode(Marsit(), local="nccl").start(comm, N)

    run_local(2, work, ranks_per_node=2)


def test_vectors_on_another_gpu_than_the_group_s_are_refused(nccl: FakeNCCL) -> None:
    nccl.gpus |= {0: Gpu("cuda:5", "GPU 5"), 1: Gpu("cuda:6", "GPU 6")}

    def work(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"are on cuda:\d, and the group of NCCL has fake:\d: call torch.cuda"):
            begun(nccl, comm, Marsit())

    run_local(2, work, ranks_per_node=2)


def test_a_rank_whose_device_is_full_is_told_and_all_can_start_again(nccl: FakeNCCL) -> None:
    def work(comm: Communicator) -> Any:
        nccl.here.rank = comm.rank
        PerNode(Marsit(None), local="nccl").connect(comm)
        device, full = nccl.devices[comm.rank], comm.rank == 1
        zeros = device.zeros
        if full:
            device.zeros = fail
            with pytest.raises(MemoryError, match="cannot hold what"):
                begun(nccl, comm, Marsit(None))
            device.zeros = zeros
        else:
            begun(nccl, comm, Marsit(None))
            with pytest.raises(Exception, match="rank 1"):
                comm.barrier()
        aggregator = begun(nccl, comm, Marsit(None))
        return bits(aggregator.aggregate(FakeArray(vector(comm.rank, 0, N), index=comm.rank)))

    def fail(n: int, dtype: str) -> Any:
        raise RuntimeError("out of memory")

    found = run_local(4, work, ranks_per_node=2)
    np.testing.assert_array_equal(found, [found[0]] * 4)
