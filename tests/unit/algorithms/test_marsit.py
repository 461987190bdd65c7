"""Marsit on one rank: the laws of its residuals, its global step, and its warnings."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import Communicator, Marsit, run_local
from mpicomp.aggregator.base import Aggregator

N = 3 * 4096 + 65
STEPS = 30


def dyadic(steps: int = STEPS, n: int = 1000, seed: int = 1) -> NDArray[np.float32]:
    """Multiples of 1/256 up to 4: float32 adds them without rounding."""
    return (np.random.default_rng(seed).integers(-1024, 1025, (steps, n)) / 256).astype(np.float32)


def updates(n: int = N, dtype: Any = np.float32, steps: int = STEPS, seed: int = 2) -> NDArray[Any]:
    """Normal values of a size that changes; a tenth of the elements stays zero, of either sign."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((steps, n)) * rng.uniform(0.5, 2, (steps, 1))).astype(dtype)
    values[:, ::20], values[:, 1::20] = 0.0, -0.0
    return values


def residual(aggregator: Aggregator) -> NDArray[Any]:
    settled = aggregator.feedback.copy_settled_residual()
    assert settled is not None
    return settled


def one_bit_step(result: NDArray[Any]) -> Any:
    """The s of a result of +-s."""
    (step,) = np.unique(np.abs(result))
    return step


# Laws ----------------------------------------------------------------------------------------------------------------


def test_own_residual_holds_what_the_votes_missed_up_to_what_is_clipped(comm: Communicator) -> None:
    """c' + s q + clipped off = c + u, exactly; only elements at the limit lose, and they lose outwards."""
    step, clip = 0.25, 3.0
    aggregator = Marsit(full_precision_every=None, global_step=step, clip=clip).start(comm, 1000)
    before, total, lost_in_all = np.zeros(1000), np.zeros(1000), np.zeros(1000)
    for u in dyadic():
        g = aggregator.aggregate(u)
        assert one_bit_step(g) == step
        np.testing.assert_array_equal(g > 0, before + u >= 0)
        after = residual(aggregator)
        lost = before + u - g - after
        lost_in_all += lost
        assert np.abs(after).max() <= clip * step
        np.testing.assert_array_equal(np.abs(after[lost != 0]), clip * step)
        assert (np.sign(lost) == np.sign(after))[lost != 0].all()
        assert aggregator.feedback.clipped_fraction == np.count_nonzero(lost) / 1000
        before, total = after, total + g
    np.testing.assert_array_equal(before + total + lost_in_all, dyadic().sum(axis=0))
    assert lost_in_all.any()


@pytest.mark.parametrize("rule", ["own", "paper"])
@pytest.mark.parametrize("every", [1, 2, 5, 29, None])
def test_without_clipping_nothing_is_lost(every: int | None, rule: Any, comm: Communicator) -> None:
    """Sum of results + c = sum of updates: exactly, in numbers that do not round."""
    aggregator = Marsit(every, global_step=0.25, residual=rule, clip=math.inf).start(comm, 1000)
    total = np.zeros(1000)
    for t, u in enumerate(dyadic()):
        total += aggregator.aggregate(u)
        np.testing.assert_array_equal(total + residual(aggregator), dyadic()[: t + 1].sum(axis=0))


def test_full_precision_rounds_give_the_compensated_update_and_clear_the_residual(comm: Communicator) -> None:
    for rule in ("own", "paper"):
        aggregator = Marsit(5, residual=rule, clip=math.inf).start(comm, N)
        for t, u in enumerate(updates()):
            before = residual(aggregator)
            g = aggregator.aggregate(u)
            if t % 5 == 0:
                np.testing.assert_array_equal(g, u + before)
                assert not residual(aggregator).any()
                assert aggregator.feedback.clipped_fraction == 0
            else:
                one_bit_step(g)


def test_a_long_vector_is_written_past_the_caches_with_the_same_values(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Marsit(None).start(comm, N)
    want = [plain.aggregate(u) for u in updates()]
    monkeypatch.setattr("mpicomp.feedback.host_signs.STREAMING_ELEMENTS", 1)
    streaming = Marsit(None).start(comm, N)
    memory = np.zeros(N + 16, np.float32)
    aligned = -memory.ctypes.data % 32 // 4
    for u, result in zip(updates(), want, strict=True):
        for start in (aligned, aligned + 1):  # off 32 bytes the stores have to be plain ones
            out = memory[start : start + N]
            state = streaming.state_dict()
            np.testing.assert_array_equal(streaming.aggregate(u, out), result)
            if start == aligned:
                streaming.load_state_dict(state)


def swings_of_steps(comm: Communicator, transactional: bool) -> list[float]:
    aggregator = Marsit(None, residual="paper", transactional=transactional).start(comm, 300)
    feedback, found = aggregator.feedback, list[float]()
    end = feedback.end_decoding

    def end_and_look(call: Any) -> None:
        end(call)
        found.append(feedback.swing())

    feedback.end_decoding = end_and_look
    for u in updates(300, seed=comm.rank):
        aggregator.aggregate(u)
    return found


@pytest.mark.parametrize(("transactional", "verify"), [(True, False), (False, True)])
def test_the_warning_is_about_the_residual_that_a_step_leaves(transactional: bool, verify: bool) -> None:
    """Also where the step keeps the old one: transactional, or begun before the ranks have compared it."""
    in_place = run_local(2, lambda comm: swings_of_steps(comm, False), verify=False)
    assert run_local(2, lambda comm: swings_of_steps(comm, transactional), verify=verify) == in_place
    assert len(set(in_place[0])) == STEPS


# Signs without a residual, and the global step -----------------------------------------------------------------------


@pytest.mark.parametrize("step", [1.0, "auto"])
def test_without_compensation_the_result_is_the_signs_and_zeros_alternate(step: Any, comm: Communicator) -> None:
    aggregator = Marsit(None, global_step=step, compensation=False).start(comm, N)
    assert aggregator.residual is None
    for t, u in enumerate(updates()):
        g = aggregator.aggregate(u)
        parity = np.where((np.arange(N) + t) % 2, 1, -1)
        np.testing.assert_array_equal(np.sign(g), np.where(u == 0, parity, np.sign(u)))
        assert one_bit_step(g) == 1 or step == "auto"


def test_with_compensation_a_constant_zero_swings_by_one_step_at_most(comm: Communicator) -> None:
    aggregator = Marsit(None, global_step=1.0).start(comm, 100)
    position = np.zeros(100)
    for _ in range(20):
        position += aggregator.aggregate(np.zeros(100, np.float32))
        assert np.abs(position).max() <= 1


@pytest.mark.parametrize("every", [None, 10])
@pytest.mark.parametrize("gamma", [1.0, 4.0])
def test_automatic_step_is_gamma_times_the_running_magnitude(
    gamma: float, every: int | None, comm: Communicator
) -> None:
    aggregator = Marsit(every, gamma=gamma).start(comm, N)
    running = math.nan
    for t, u in enumerate(updates()):
        mean = float(np.abs(u.astype(np.float64)).mean())
        if t == 0:
            running = mean  # the first round asks beforehand
        g = aggregator.aggregate(u)
        if every is None or t % every:
            assert one_bit_step(g) == pytest.approx(gamma * running, rel=1e-6)
        running = 0.9 * running + 0.1 * mean


def test_automatic_gamma_rises_while_too_much_is_clipped_and_falls_otherwise(comm: Communicator) -> None:
    aggregator = Marsit(None, gamma="auto").start(comm, N)
    assert aggregator.feedback.size.gamma == 4
    rng, seen = np.random.default_rng(4), []
    for t in range(200):
        before = aggregator.feedback.size.gamma
        u = rng.standard_normal(N) * (1 if t < 100 else np.where(np.arange(N) % 8, 0.01, 40))
        aggregator.aggregate(u.astype(np.float32))
        change = math.log(aggregator.feedback.size.gamma / before)
        assert change == pytest.approx(0.2 * (aggregator.feedback.clipped_fraction - 0.015), abs=1e-12)
        seen.append(aggregator.feedback.size.gamma)
    assert seen[99] < 4 < seen[-1]


def test_automatic_gamma_stays_in_range(comm: Communicator) -> None:
    sparse = np.zeros(1000, np.float32)
    sparse[:700] = 1
    for u, bound in ((np.zeros(1000, np.float32), 0.25), (sparse, 16)):
        aggregator = Marsit(None, gamma="auto", clip=1e-3).start(comm, 1000)
        for _ in range(1200 if bound < 1 else 60):
            aggregator.aggregate(u)
        assert aggregator.feedback.size.gamma == bound


def test_a_chosen_gamma_outlives_a_restored_one(comm: Communicator) -> None:
    chosen = Marsit(None, gamma=1).start(comm, N)
    chosen.load_state_dict(Marsit(None, gamma=4).start(comm, N).state_dict())
    assert chosen.feedback.size.gamma == 1


# A residual that loses much or explodes is told once; a sound one never ----------------------------------------------


def warned(options: Marsit, comm: Communicator, steps: int, scale: float = 1.0) -> list[tuple[int, str, Any]]:
    """Step, text and file of each warning, over normally distributed updates."""
    aggregator = options.start(comm, 1000)
    rng = np.random.default_rng(1)
    found = []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            aggregator.aggregate((scale * rng.standard_normal(1000)).astype(np.float32))
        found += [(step, str(w.message), w.filename) for w in caught]
        assert all(issubclass(w.category, RuntimeWarning) for w in caught)
    return found


LOST = r"of the residual is clipped at step 99: gamma is too small"
EXPLODED = r"rank 0: the residual is .* divergence is ahead; use residual='own'"


@pytest.mark.parametrize("every", [None, 100])  # the full-precision round that clears the residual does not hide it
@pytest.mark.parametrize(("rule", "step", "text"), [("own", 0.1, LOST), ("paper", 0.01, EXPLODED)])
def test_a_residual_that_loses_much_or_grows_is_told_once_after_a_hundred_steps(
    every: int | None, rule: Any, step: float, text: str, comm: Communicator
) -> None:
    ((at, told, file),) = warned(Marsit(every, global_step=step, residual=rule), comm, 300)
    assert (at, file) == (99, __file__)
    assert re.search(text, told)


@pytest.mark.parametrize(
    "options",
    [
        Marsit(),
        Marsit(None),
        Marsit(None, gamma="auto"),
        Marsit(None, residual="paper"),
        Marsit(None, compensation=False, global_step=0.01),
    ],
    ids=str,
)
def test_sound_residuals_are_not_told(options: Marsit, comm: Communicator) -> None:
    for scale in (1.0, 0.0):
        assert not warned(options, comm, 250, scale)
