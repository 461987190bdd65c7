"""Vectors and results that ranks of a node read in place: the bits, errors and states are those of messages."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from collectives import NonFiniteGradient, PeerFailure
from collectives.arrays.peer_memory import PeerMemory, UnreadableMemory
from mpicomp import QSGD, Communicator, Dense, EFSignSGD, LocalTopK, MajorityVote, Marsit, PerNode, run_local
from mpicomp.feedback.step_size import StepSize
from mpicomp.nodes.direct_sum import DirectSum
from tests.exact import gradient

N = 5 * 65_536 + 900
LENGTHS = (700, 2 * 65_536 + 5, N - 704 - 2 * 65_536 - 64)
STEPS = 4
LAYOUTS = {"2x2": (4, 2), "2+1": (3, 2), "2+2+1": (5, 2), "3x2": (6, 3), "one node": (3, 3)}
MARSITS = {
    "own": Marsit(None),
    "dense rounds": Marsit(2),
    "paper": Marsit(3, residual="paper"),
    "stateless": Marsit(None, compensation=False, global_step=0.5),
    "stateless auto": Marsit(None, compensation=False),
    "two winners": Marsit(None, winners=2),
    "transactional": Marsit(None, transactional=True),
    "skip": Marsit(None, nonfinite="skip"),
}


def work(comm: Communicator, method: Any, local: Any, dtype: str, spoils: bool = False) -> Any:
    """Return this rank's results, its state, and the errors of steps in which one rank had NaN."""
    aggregator = PerNode(method, local).start(comm, N, dtype=dtype, tensor_lengths=LENGTHS, vector_id=3)
    results, errors = list[Any](), list[str]()
    for step in range(STEPS):
        mine = gradient(comm.rank, step, N, dtype, LENGTHS)
        if spoils and step == 2 and comm.rank == 1:
            mine = mine.copy()
            mine[-5] = np.nan
        try:
            results.append(aggregator.aggregate(mine))
        except NonFiniteGradient as error:
            errors.append(str(error))
        except RuntimeError as error:
            errors.append(str(error))
    feedback = aggregator.feedback
    if "is spoiled" in "".join(errors):  # there is no state to save
        return results, {"gamma": feedback.size.gamma, "magnitudes": feedback.size.magnitudes}, errors
    return results, aggregator.state_dict(), errors


def both(method: Any, layout: str, dtype: str = "float32", spoils: bool = False) -> Any:
    """Return the ranks' results with reads in place and by messages."""
    ranks, per = LAYOUTS[layout]
    return [
        run_local(ranks, lambda comm, local=local: work(comm, method, local, dtype, spoils), ranks_per_node=per)
        for local in ("shared", "ring")
    ]


def assert_equal(found: Any, expected: Any) -> None:
    for (results, state, errors), (others, other_state, other_errors) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(results, others)
        assert errors == other_errors
        assert state.keys() == other_state.keys()
        for key in state:
            np.testing.assert_array_equal(state[key], other_state[key], err_msg=key)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count pieces that were summed as they were encoded, and shards that were unpacked."""
    counts = {"read": 0, "_unpack": 0, "_copy": 0}

    def counted(name: str) -> Any:
        right = getattr(DirectSum, name)

        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return right(*arguments)

        return call

    for name in counts:
        monkeypatch.setattr(DirectSum, name, counted(name))
    return counts


@pytest.mark.parametrize("name", MARSITS)
def test_marsit_has_the_bits_of_messages(name: str, reads: dict[str, int]) -> None:
    assert_equal(*both(MARSITS[name], "2x2"))
    assert (reads["read"] > 0) == (name != "skip")
    assert (reads["_unpack"] > 0) == (name not in ("skip", "two winners"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_nodes_and_types_have_the_bits_of_messages(layout: str, dtype: str, reads: dict[str, int]) -> None:
    assert_equal(*both(Marsit(3), layout, dtype))
    assert (reads["_unpack"] > 0) == (layout != "one node")
    assert reads["_copy"] > 0


@pytest.mark.parametrize("method", [Dense(), QSGD(), EFSignSGD(), LocalTopK(50), MajorityVote()], ids=str)
def test_other_methods_have_the_bits_of_messages(method: Any, reads: dict[str, int]) -> None:
    assert_equal(*both(method, "2x2"))
    assert reads["_copy"] > 0


@pytest.mark.parametrize("name", MARSITS)
def test_nan_on_one_rank_leaves_all_shards_as_by_messages(name: str) -> None:
    found, expected = both(MARSITS[name], "2x2", spoils=True)
    assert_equal(found, expected)
    assert all(errors for _, _, errors in found) == (name != "skip")


def test_a_shard_that_adopted_its_reports_goes_back_when_another_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    restored, right = list[int](), StepSize.restore

    def restore(self: StepSize, before: Any) -> None:
        restored.append(1)
        right(self, before)

    monkeypatch.setattr(StepSize, "restore", restore)
    found, expected = both(MARSITS["stateless auto"], "2x2", spoils=True)
    assert_equal(found, expected)
    assert restored


def test_memory_that_the_kernel_does_not_let_ranks_read_is_shared_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reads: dict[str, int]
) -> None:
    def refuse(*arguments: Any) -> None:
        raise UnreadableMemory(1, "Operation not permitted")

    monkeypatch.setattr(PeerMemory, "read", refuse)
    with caplog.at_level(logging.WARNING, "mpicomp"):
        assert_equal(*both(Marsit(3), "2x2"))
    assert not any(reads.values())
    assert not caplog.records


def test_a_rank_whose_memory_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(comm: Communicator) -> str:
        aggregator = PerNode(Dense()).start(comm, N)
        aggregator.aggregate(np.zeros(N, np.float32))
        comm.barrier()
        if comm.rank == 0:
            aggregator.driver._local._peers[1] = PeerMemory(2**22 + 1)

        def make_step() -> None:
            aggregator.aggregate(np.zeros(N, np.float32))
            comm.barrier()

        with pytest.raises((PeerFailure, RuntimeError)) as caught:
            make_step()
        return str(caught.value)

    texts = run_local(2, fail, timeout=5)
    assert "no memory of rank 1 can be read: No such process" in texts[0]
