"""A state that is taken, stored and loaded goes on to the bit."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import Communicator
from mpicomp.algorithms import (
    ECQSGD,
    QSGD,
    SSDM,
    CascadingSSDM,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    LocalTopK,
    MajorityVote,
    Marsit,
    MemSGD,
    OneBitSGD,
    RandomK,
    ScaleCom,
    TernGrad,
    TrueTopK,
)

N, STEPS = 4096 + 77, 30
SEGMENTS = (100, 64, N - 192)
METHODS = {
    "dense": Dense(),
    "cascading": CascadingSSDM(),
    "own": Marsit(7),
    "own, never dense": Marsit(None, clip=0.5),
    "automatic gamma": Marsit(None, gamma="auto"),
    "paper": Marsit(7, residual="paper"),
    "paper, never dense": Marsit(None, residual="paper", global_step=0.5),
    "no residual": Marsit(7, compensation=False),
    "majority": MajorityVote(),
    "ef-signsgd": EFSignSGD(),
    "ef-signsgd, buckets": EFSignSGD(bucket=300),
    "ssdm": SSDM(),
    "ssdm, momentum": SSDM(momentum=0.9, scale="norm", coding="elias"),
    "qsgd": QSGD(),
    "ecq-sgd": ECQSGD(alpha=0.1),
    "terngrad": TernGrad(),
    "1-bit sgd": OneBitSGD(),
    "double-squeeze": DoubleSqueeze(),
    "mem-sgd": MemSGD("top-k:rate=10"),
    "local top-k": LocalTopK(10),
    "scalecom": ScaleCom(10, chunk=70, beta=0.4, warmup_steps=5),
    "random-k": RandomK(10),
    "true top-k": TrueTopK(10),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def updates(dtype: str = "float32") -> NDArray[Any]:
    rng = np.random.default_rng(6)
    return (rng.standard_normal((STEPS, N)) * rng.uniform(0.5, 2, (STEPS, 1))).astype(dtype)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], name)


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """What comes back from a file of arrays."""
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return dict(np.load(file, allow_pickle=False))


@every_method
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("taken", [0, 7, 13])
def test_another_aggregator_goes_on_from_a_stored_state(
    method: Any, dtype: str, taken: int, comm: Communicator
) -> None:
    going_on = method.start(comm, N, dtype=dtype, segments=SEGMENTS)
    given = updates(dtype)
    for u in given[:taken]:
        going_on.aggregate(u)
    resumed = method.start(comm, N, dtype=dtype, segments=SEGMENTS)
    resumed.load_state_dict(stored(going_on.state_dict()))
    assert_same(resumed.state_dict(), going_on.state_dict())
    for u in given[taken:]:
        np.testing.assert_array_equal(resumed.aggregate(u), going_on.aggregate(u))
    assert_same(resumed.state_dict(), going_on.state_dict())


@every_method
def test_an_aggregator_goes_back_to_a_state_of_its_own(method: Any, comm: Communicator) -> None:
    aggregator, given = method.start(comm, N), updates()
    for u in given[:5]:
        aggregator.aggregate(u)
    state = aggregator.state_dict()
    first = [aggregator.aggregate(u) for u in given[5:12]]
    aggregator.load_state_dict(state)
    for u, result in zip(given[5:12], first, strict=True):
        np.testing.assert_array_equal(aggregator.aggregate(u), result)


@every_method
def test_a_state_does_not_follow_the_steps_after_it_nor_the_aggregator_the_state(
    method: Any, comm: Communicator
) -> None:
    aggregator, untouched = method.start(comm, N), method.start(comm, N)
    for u in updates()[:3]:
        aggregator.aggregate(u)
        untouched.aggregate(u)
    state, same = aggregator.state_dict(), aggregator.state_dict()
    aggregator.aggregate(updates()[3])
    assert_same(state, same)
    aggregator.load_state_dict(state)
    for value in state.values():
        if isinstance(value, np.ndarray):
            value[:] = 5
    assert_same(aggregator.state_dict(), untouched.state_dict())


@every_method
def test_taking_a_state_changes_nothing(method: Any, comm: Communicator) -> None:
    watched, unwatched = method.start(comm, N), method.start(comm, N)
    for u in updates():
        np.testing.assert_array_equal(watched.aggregate(u), unwatched.aggregate(u))
        watched.state_dict()


@every_method
def test_a_state_of_another_length_or_method_is_refused(method: Any, comm: Communicator) -> None:
    aggregator = method.start(comm, N)
    other = CascadingSSDM() if isinstance(method, Marsit) else Marsit()
    for state in (method.start(comm, N - 1).state_dict(), other.start(comm, N).state_dict(), {}):
        with pytest.raises(ValueError, match=f"is not one of .* for {N} elements, which has"):
            aggregator.load_state_dict(state)


def test_a_state_of_other_segments_is_refused_whole(comm: Communicator) -> None:
    segmented, single = Marsit(7).start(comm, N, segments=SEGMENTS), Marsit(7).start(comm, N)
    for u in updates()[:3]:
        segmented.aggregate(u)
    before = segmented.state_dict()
    with pytest.raises(ValueError, match="magnitudes of 1 segments, the aggregator has 3: start it with the same"):
        segmented.load_state_dict(single.state_dict())
    for wrong in (np.zeros(1, np.float32), np.zeros((1, N), np.float32), np.float32(0)):
        with pytest.raises(ValueError, match="residual has shape"):
            segmented.load_state_dict(before | {"residual": wrong, "step": 0})
    assert_same(segmented.state_dict(), before)
