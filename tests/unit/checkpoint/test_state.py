"""States on disk, and on other numbers of ranks."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.threads.run_local import run_local
from mpicomp import ALGORITHMS, Communicator, Dense, Marsit
from mpicomp.checkpoint.redistribute import redistribute
from mpicomp.checkpoint.state import load_state, save_state

N = 3 * 4096 + 5
NESTED: dict[str, Any] = {
    "n": 7,
    "step": 2**40,
    "gamma": 0.1 + 0.2,
    "unseen": math.nan,
    "name": "marsit ± ü",
    "none": None,
    "flag": True,
    "residual": np.arange(7, dtype=np.float32) / 3,
    "words": np.array([2**64 - 1, 0], np.uint64),
    "empty": np.zeros((0, 3)),
    "scalar": np.float64(1) / 3,
    "inner": {"residual": np.full((2, 2), -0.0), "order": [1, (2, "x")], 3: "three"},
}


SMALL: dict[str, Any] = {"step": 3, "residual": np.arange(7, dtype=np.float32) / 3}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other)
    else:
        assert one == other
        assert isinstance(one, np.generic) or type(one) is type(other)


# On disk --------------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    save_state(path, NESTED)
    assert_same(load_state(path), load_state(str(path)))
    assert_same(NESTED, load_state(path))
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]


def test_a_file_is_replaced_whole_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    save_state(path, {"step": 1})
    save_state(path, {"step": 2})
    assert load_state(path) == {"step": 2}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*state"):
        save_state(path, {"step": 3})
    assert load_state(path) == {"step": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([None, 3]), 1j])
def test_what_cannot_be_stored_is_named_and_nothing_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="cannot pack a"):
        save_state(tmp_path / "state", {"inner": {"x": value}})
    assert not list(tmp_path.iterdir())


def test_a_truncated_file_is_told_at_any_length(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, SMALL)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"state is truncated, altered or no state .*: load an earlier one"):
            load_state(path)


def test_a_flipped_bit_is_told_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, SMALL)
    whole = path.read_bytes()
    told = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            found = load_state(path)
        except ValueError as error:
            text = str(error)
            told += 1
        else:
            assert_same(SMALL, found)  # in a date, say
            continue
        assert text.startswith(str(path))
    assert told > len(whole) / 2


def test_a_value_that_was_exchanged_behind_the_archives_back_is_told(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, NESTED)
    with np.load(path) as file:
        members = dict(file)
    largest = max(members, key=lambda name: members[name].size if name.isdigit() else 0)
    members[largest] = members[largest] + 1
    with path.open("wb") as file:
        np.savez(file, **members)
    with pytest.raises(ValueError, match=r"is altered \(its SHA-256 is not the one it names\): load an earlier one"):
        load_state(path)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads change places also within calls of C functions: whenever these make garbage collection run."""

    def pause(_phase: str, _info: dict[str, int]) -> None:
        time.sleep(0)

    between, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    gc.callbacks.append(pause)
    yield
    gc.callbacks.remove(pause)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(between)


@pytest.mark.usefixtures("restless")
def test_threads_read_states_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    save_state(path, SMALL)
    with ThreadPoolExecutor(4) as threads:
        for state in threads.map(load_state, [path] * 40):
            assert_same(SMALL, state)


def test_other_files_are_no_states(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, residual=np.ones(3))
    with pytest.raises(ValueError, match=r"other.npz holds no state: name a file that save_state wrote"):
        load_state(path)
    for content in (b"", b"PK", b"a text", np.lib.format.MAGIC_PREFIX):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="no state"):
            load_state(path)
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(ValueError, match="no state"):
        load_state(tmp_path / "array.npy")
    np.savez(path, state=np.array([{"pickled": 1}], object), sha256=np.zeros(32, np.uint8))
    with pytest.raises(ValueError, match="no state"):
        load_state(path)
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "none")


# On other numbers of ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_kind_becomes_what_it_should(dtype: Any, ranks: int) -> None:
    rng = np.random.default_rng(0)
    residuals = (rng.standard_normal((3, 10)) * [[1], [1e6], [1e-6]]).astype(dtype)
    parts = np.zeros((3, 10), dtype)
    for rank in range(3):
        parts[rank, 4 * rank : 4 * rank + 4] = rng.standard_normal(10)[4 * rank : 4 * rank + 4]
    states = [
        {"n": 10, "scale": math.nan, "note": None, "e": {"r": residuals[rank]}, "own": parts[rank]} for rank in range(3)
    ]
    kinds: Any = {"n": "shared", "scale": "shared", "note": "shared", "e": "mean", "own": "owner", "never": "mean"}
    found = redistribute(states, ranks, kinds)
    assert len(found) == ranks
    mean = (residuals.astype(np.float64).sum(axis=0) / 3).astype(dtype)
    for state in found:
        assert_same(state, {"n": 10, "scale": math.nan, "note": None, "e": {"r": mean}, "own": parts.sum(axis=0)})


def test_the_mean_is_rounded_once() -> None:
    """Added up in float32, each 1 would be lost beside 2^24."""
    states = [{"r": np.array([value], np.float32)} for value in (2.0**24, 1, 1, 1, 1)]
    assert redistribute(states, 1, {"r": "mean"})[0]["r"][0] == np.float32((2**24 + 4) / 5)


def test_states_that_do_not_belong_together_are_refused() -> None:
    kinds: Any = {"step": "shared", "r": "mean", "own": "owner", "text": "shared"}
    one = {"step": 3, "r": np.zeros(4, np.float32), "own": np.zeros(4, np.float32), "text": "a"}
    refused = [
        ({"text": "bc"}, r"ranks 0 and 2 differ in text \(a and bc\): take states of one run"),
        ({"step": 4}, r"ranks 0 and 2 differ in step \(3 and 4\): take states of one run"),
        ({"text": "b"}, "differ in text"),
        ({"r": np.zeros(5, np.float32)}, r"differ in r \(float32\[4\] and float32\[5\]\)"),
        ({"r": np.zeros(4)}, "differ in r"),
        ({"more": 1}, "ranks 0 and 2 have states with"),
    ]
    for change, message in refused:
        with pytest.raises(ValueError, match=message):
            redistribute([one, one, one | change], 2, kinds)
    with pytest.raises(ValueError, match="rank 1 owns elements of own that a lower rank owns too"):
        redistribute([one | {"own": np.ones(4)}] * 2, 2, kinds)
    with pytest.raises(ValueError, match="r holds int64, of which ranks have no mean part"):
        redistribute([one | {"r": np.ones(4, np.int64)}] * 2, 2, kinds)
    with pytest.raises(ValueError, match="nothing says what step are on other ranks"):
        redistribute([{"step": 1}], 2, {})
    for states, ranks in (([], 2), ([one], 0)):
        with pytest.raises(ValueError, match="a state goes from 1 rank or more to 1 or more"):
            redistribute(states, ranks, kinds)


def updates(ranks: int, step: int, dtype: str) -> NDArray[Any]:
    rng = np.random.default_rng([ranks, step])
    return (rng.standard_normal((ranks, N)) * rng.uniform(0.5, 2)).astype(dtype)


def resumed_on(
    method: Any, counts: tuple[int, ...], steps: int, dtype: str, check: Callable[[list[Any], list[Any]], None]
) -> tuple[NDArray[np.float64], list[dict[str, Any]]]:
    """Sum of the results of runs that go on on other numbers of ranks, less the ranks' mean update; the last states."""
    missing, states = np.zeros(N), []
    for ranks in counts:

        def work(comm: Communicator, before: Any = states) -> Any:
            aggregator = method.start(comm, N, dtype=dtype)
            if before:
                aggregator.load_state_dict(redistribute(before, comm.size, aggregator.state_kinds)[comm.rank])
            start = aggregator.state_dict()
            given = [updates(comm.size, step, dtype) for step in range(steps)]
            results = [aggregator.aggregate(u[comm.rank]) for u in given]
            return results, start, aggregator.state_dict()

        found = run_local(ranks, work, "ring")
        check(states, [start for _, start, _ in found])
        for step in range(steps):
            assert len({results[step].tobytes() for results, _, _ in found}) == 1
            missing += updates(ranks, step, dtype).astype(np.float64).mean(axis=0) - found[0][0][step]
        states = [state for _, _, state in found]
    return missing, states


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("every", [None, 7])
@pytest.mark.parametrize("rule", ["own", "paper"])
def test_what_is_pending_is_kept_from_4_ranks_to_3_to_8(rule: Any, every: int | None, dtype: str) -> None:
    precision = 2.0**-23 if dtype == "float32" else 2.0**-52

    def same_mean(old: list[Any], new: list[Any]) -> None:
        if not old:
            return
        before, after = (np.mean([s["residual"].astype(np.float64) for s in states], axis=0) for states in (old, new))
        assert (np.abs(before - after) <= 4 * precision * np.abs(before)).all()
        assert np.abs(before).max() > 0
        assert all(state["step"] == old[0]["step"] for state in new)
        assert all((state["magnitudes"] == old[0]["magnitudes"]).all() for state in new)

    steps = 10
    missing, states = resumed_on(Marsit(every, residual=rule, seed=3), (4, 3, 8), steps, dtype, same_mean)
    assert states[0]["step"] == 3 * steps
    if rule == "paper":  # sum of g + mean of c = sum of the mean u, whatever the ranks were
        pending = np.mean([state["residual"].astype(np.float64) for state in states], axis=0)
        largest = max(np.abs(state["residual"]).max() for state in states) + 10
        assert np.abs(missing - pending).max() <= 3 * steps * precision * largest


def pending(states: list[Any], kinds: dict[str, str]) -> NDArray[np.float64]:
    """What the ranks have yet to give."""
    total = np.zeros(N)
    for key, kind in kinds.items():
        if kind in ("mean", "owner") and np.size(states[0].get(key, ())):
            kept = [state[key].astype(np.float64) for state in states]
            total += np.mean(kept, axis=0) if kind == "mean" else np.sum(kept, axis=0)
    return total


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_goes_on_on_other_numbers_of_ranks(name: str) -> None:
    method = ALGORITHMS[name]()

    def nothing_lost(old: list[Any], new: list[Any]) -> None:
        if old:
            kinds = run_local(1, lambda comm: method.start(comm, N).state_kinds)[0]
            before = pending(old, kinds)
            assert np.abs(pending(new, kinds) - before).max() <= 2.0**-22 * np.abs(before).max()

    resumed_on(method, (4, 3, 8), 2, "float32", nothing_lost)


@pytest.mark.parametrize("name", ["double-squeeze", "mem-sgd", "one-bit-sgd", "ef-signsgd", "local-top-k", "scalecom"])
def test_results_and_what_is_pending_are_what_was_given(name: str) -> None:
    """The law of error feedback holds over a change of ranks as well."""
    method, steps = ALGORITHMS[name](), 5
    kinds = run_local(1, lambda comm: method.start(comm, N).state_kinds)[0]
    missing, states = resumed_on(method, (4, 3, 8), steps, "float32", lambda old, new: None)
    left = pending(states, kinds)
    assert np.abs(left).max() > 0
    assert np.abs(missing - left).max() <= 3 * steps * 2.0**-22 * 10 * np.abs(left).max()


def test_dense_goes_on_anywhere() -> None:
    missing, states = resumed_on(Dense(), (4, 3, 8), 2, "float64", lambda old, new: None)
    assert np.abs(missing).max() < 1e-12
    assert states[0] == {"method": "Dense", "n": N, "step": 6}
