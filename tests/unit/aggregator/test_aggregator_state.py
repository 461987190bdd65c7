"""A state that is taken, stored and loaded goes on to the bit."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import CommunicatorClosed, NonFiniteGradient, Star
from mpicomp import Communicator, run_local
from mpicomp.algorithms import ALGORITHMS, DoubleSqueeze, Marsit, MemSGD
from mpicomp.state.state_file import load_state, save_state
from tests.methods import METHODS

N, STEPS = 4096 + 77, 12
SEGMENTS = (100, 64, N - 192)
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def updates(dtype: str = "float32") -> NDArray[Any]:
    rng = np.random.default_rng(6)
    return (rng.standard_normal((STEPS, N)) * rng.uniform(0.5, 2, (STEPS, 1))).astype(dtype)


@every_method
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_another_aggregator_goes_on_from_a_stored_state(
    method: Any, dtype: str, comm: Communicator, tmp_path: Path
) -> None:
    """Taking a state changes nothing, and it may be taken at any step."""
    watched, unwatched = (method.start(comm, N, dtype=dtype, tensor_lengths=SEGMENTS) for _ in range(2))
    resumed = []
    for step, u in enumerate(updates(dtype)):
        state = watched.state_dict()
        if step in (0, 3, 7):
            save_state(tmp_path / "state", state)
            resumed.append(method.start(comm, N, dtype=dtype, tensor_lengths=SEGMENTS))
            resumed[-1].load_state_dict(load_state(tmp_path / "state"))
            np.testing.assert_equal(resumed[-1].state_dict(), watched.state_dict())
        result = unwatched.aggregate(u)
        for other in (watched, *resumed):
            np.testing.assert_array_equal(other.aggregate(u), result)
    for other in resumed:
        np.testing.assert_equal(other.state_dict(), unwatched.state_dict())


@every_method
def test_an_aggregator_goes_back_to_a_state_of_its_own_and_neither_follows_the_other(
    method: Any, comm: Communicator
) -> None:
    (aggregator, untouched), given = (method.start(comm, N) for _ in range(2)), updates()
    for u in given[:5]:
        aggregator.aggregate(u)
        untouched.aggregate(u)
    state, same = aggregator.state_dict(), aggregator.state_dict()
    first = [aggregator.aggregate(u) for u in given[5:10]]
    np.testing.assert_equal(state, same)
    aggregator.load_state_dict(state)
    for value in state.values():
        if isinstance(value, np.ndarray):
            value[:] = 5
    np.testing.assert_equal(aggregator.state_dict(), untouched.state_dict())
    for u, result in zip(given[5:10], first, strict=True):
        np.testing.assert_array_equal(aggregator.aggregate(u), result)


def refused(aggregator: Any, state: Any, told: str) -> None:
    """The state is not loaded, and nothing of it."""
    before = aggregator.state_dict()
    with pytest.raises(ValueError, match=rf"^rank \d+ of \d+, vector 0: this state.*{told}") as caught:
        aggregator.load_state_dict(state)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500
    np.testing.assert_equal(aggregator.state_dict(), before)


def taken_after_steps(
    method: Any, comm: Communicator, n: int = N, tensor_lengths: Any = None
) -> tuple[Any, dict[str, Any]]:
    """An aggregator, and another's state that has other numbers in everything."""
    aggregator, other = (method.start(comm, n, tensor_lengths=tensor_lengths) for _ in range(2))
    given = updates()[:, :n]
    aggregator.aggregate(given[0])
    for u in given[1:4]:
        other.aggregate(u)
    return aggregator, other.state_dict()


@every_method
def test_a_state_of_another_length_is_refused(method: Any, comm: Communicator) -> None:
    aggregator, _ = taken_after_steps(method, comm)
    _, shorter = taken_after_steps(method, comm, N - 1)
    for state in (shorter, {}):
        refused(aggregator, state, f"is not one of .* for {N} elements, which has")


def test_a_state_of_another_method_is_refused(comm: Communicator) -> None:
    """Also where it has the same entries of the same shapes."""
    taken = {made.__name__: taken_after_steps(made(), comm) for made in ALGORITHMS.values()}
    for (name, (aggregator, _)), (other, (_, state)) in itertools.permutations(taken.items(), 2):
        refused(aggregator, state, f"by {other} with .* is not one of {name}")
        if (state.keys() ^ aggregator.state_dict().keys()) - {"owned"}:
            refused(aggregator, state | {"method": name}, "is not one of")


def damaged(name: str, value: Any) -> Iterator[tuple[Any, str]]:
    """Wrong value of an entry of a state, and the error's words on it."""
    match name:
        case "method":
            yield from ((wrong, "is not one of") for wrong in ("Methodless", "", None, 3, "\ud800\n" * 1000, [value]))
        case "n":
            wrongs = (value + 1, str(value), float(value), None, [value], 10**400, 10**19, 10**5000)
            yield from ((wrong, "is not one of") for wrong in wrongs)
        case "step":
            wrongs = (-1, 1.5, "1", None, [1], True, 2**70, 10**19, 10**400, 10**5000, {}, np.int8(-1))
            yield from ((wrong, "step is .*, not an integer from 0 to") for wrong in wrongs)
        case "owned":
            wrongs = (None, "text", [0], [[0, N]], [0.0, 9.0], [0, 10**400], [0, 10**19], {"a": 1}, np.zeros((2, 0)))
            yield from ((wrong, "owned is .*, not a range") for wrong in wrongs)
            yield from ((wrong, "was taken by the owner of") for wrong in ([1, N], [0, 0], [-1, N]))
        case _:
            array = np.asarray(value)
            shapes = {(1,), (1, *array.shape), (array.size + 1,), (), (0,)} - {array.shape}
            yield from ((np.zeros(shape, array.dtype), f"{name} has shape") for shape in shapes)
            yield np.full(array.shape, "one"), f"{name} holds <U3, not numbers"
            yield array.astype(complex), f"{name} holds complex128, not numbers"
            yield np.full(array.shape, 10**400, object), f"{name} holds object, not numbers"
            yield [[1], [1, 2]], f"{name} is no array"
            for number in (np.nan, np.inf, -np.inf):
                if array.size and array.dtype.kind == "f" and not (name == "magnitudes" and np.isnan(number)):
                    wrong = array.copy()
                    wrong[(-1,) * array.ndim] = number
                    yield wrong, f"{name} holds NaN or infinity"
            if array.size and array.dtype == np.float32:
                yield np.full(array.shape, 1e39), f"{name} holds NaN or infinity in float32"


@every_method
def test_a_state_with_one_bad_entry_is_refused_whole(method: Any, comm: Communicator) -> None:
    aggregator, state = taken_after_steps(method, comm, tensor_lengths=SEGMENTS)
    for name, value in state.items():
        for wrong, told in damaged(name, value):
            refused(aggregator, state | {name: wrong}, told)
        if name != "owned":  # states of earlier versions lack it
            refused(aggregator, {key: state[key] for key in state if key != name}, "is not one of")
    for more in ("more", 3, ("a", "b"), "\ud800\n" * 1000):
        refused(aggregator, state | {more: 1}, "is not one of")
    for wrong in (None, [], "text", 10**5000, [state]):
        refused(aggregator, wrong, "is .*, not a dict")
    aggregator.load_state_dict(state)
    np.testing.assert_equal(aggregator.state_dict(), state)


@pytest.mark.parametrize("topology", [Star(), "ring"])
def test_all_ranks_refuse_what_one_of_them_would(topology: Any) -> None:
    """DoubleSqueeze's state for MEM-SGD, whose owners keep nothing; under a star most ranks own nothing."""

    def work(comm: Communicator) -> int:
        for method, other in ((DoubleSqueeze(), MemSGD()), (MemSGD(), DoubleSqueeze())):
            aggregator, state = taken_after_steps(method, comm)
            _, wrong = taken_after_steps(other, comm)
            refused(aggregator, wrong, "is not one of")
            refused(aggregator, wrong | {"method": state["method"]}, "owner_error has shape")
        return comm.rank

    assert run_local(3, work, topology) == [0, 1, 2]


def test_a_state_of_other_segments_is_refused_whole(comm: Communicator) -> None:
    segmented, _ = taken_after_steps(Marsit(7), comm, tensor_lengths=SEGMENTS)
    _, single = taken_after_steps(Marsit(7), comm)
    refused(segmented, single, r"magnitudes has shape \(1,\), not \(3,\): start the aggregator with the options")


def test_magnitudes_are_nan_for_all_tensors_or_for_none(comm: Communicator) -> None:
    aggregator = Marsit().start(comm, 128, tensor_lengths=[64, 64])
    state = aggregator.state_dict()
    aggregator.load_state_dict(state | {"magnitudes": np.full(2, np.nan)})
    refused(aggregator, state | {"magnitudes": np.array([1.0, np.nan])}, "NaN for some tensors and numbers for others")


def test_a_state_of_a_call_in_flight_is_refused_with_rank_and_vector(comm: Communicator) -> None:
    aggregator = Marsit().start(comm, 64, vector_id=3)
    state = aggregator.state_dict()
    handle = aggregator.begin(np.ones(64, np.float32))
    told = r"^rank 0 of 1, vector 3: the call of step 0 .* before a state is taken or loaded$"
    for access in (aggregator.state_dict, lambda: aggregator.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=told):
            access()
    handle.wait()


def test_a_spoiled_residual_has_no_state_and_the_error_names_rank_and_vector(comm: Communicator) -> None:
    aggregator = Marsit().start(comm, 64, vector_id=3)
    aggregator.aggregate(np.ones(64, np.float32))
    with pytest.raises(NonFiniteGradient):
        aggregator.aggregate(np.full(64, np.nan, np.float32))
    with pytest.raises(RuntimeError, match=r"^rank 0 of 1, vector 3: an earlier step met NaN"):
        aggregator.state_dict()


def test_nothing_starts_on_a_closed_communicator() -> None:
    comm = Communicator(MPI.COMM_SELF)
    comm.close()
    for start in (comm.start_progress_thread, lambda: Marsit().start(comm, 3)):
        with pytest.raises(CommunicatorClosed, match="rank 0 of 1: this communicator cannot be used"):
            start()


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_objects_that_communicate_are_neither_copied_nor_pickled(take: Any, comm: Communicator) -> None:
    aggregator = Marsit().start(comm, 3)
    handle = aggregator.begin(np.ones(3, np.float32))
    for one, where in ((comm, ""), (aggregator, ", vector 0"), (handle, "")):
        told = f"^rank 0 of 1{where}: {type(one).__name__}, which communicates, is not copied or pickled; "
        with pytest.raises(TypeError, match=told):
            take(one)
    handle.wait()
