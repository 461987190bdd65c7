"""Marsit on one rank: the laws of its residuals, its global step, and the reference's bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mpicomp import Communicator, Marsit
from mpicomp.aggregator.base import Aggregator
from tests.reference.marsit import OneRankMarsit

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
    settled = aggregator.feedback.settled_residual()
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("every", [1, 3, 10, None])
def test_paper_conserves_any_updates_up_to_rounding(every: int | None, dtype: Any, comm: Communicator) -> None:
    aggregator = Marsit(every, residual="paper").start(comm, N, dtype=dtype)
    given = updates(dtype=dtype)
    total, largest = np.zeros(N), 0.0
    for u in given:
        g = aggregator.aggregate(u)
        total += g
        largest = max(largest, float((np.abs(residual(aggregator)) + np.abs(g)).max()))
    missing = np.abs(total + residual(aggregator) - given.sum(axis=0, dtype=np.float64)).max()
    assert missing <= STEPS * np.finfo(dtype).eps * largest


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


# To the bit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("every", [None, 7])
@pytest.mark.parametrize("rule", ["own", "paper"])
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_results_and_residuals_are_the_reference_s(
    rule: Any, every: int | None, dtype: Any, clip: float, comm: Communicator
) -> None:
    """The reference subtracts at once what rule "paper" here leaves to the next step."""
    aggregator = Marsit(every, global_step=0.8, residual=rule, clip=clip).start(comm, N, dtype=dtype)
    reference = OneRankMarsit(N, dtype, rule, every, clip)
    for u in updates(dtype=dtype):
        np.testing.assert_array_equal(aggregator.aggregate(u), reference.aggregate(u, dtype(0.8)))
        np.testing.assert_array_equal(residual(aggregator), reference.c)
        assert aggregator.feedback.clipped_fraction == reference.clipped / N


@pytest.mark.parametrize("rule", ["own", "paper"])
def test_segments_have_steps_of_their_own_in_results_and_residuals(rule: Any, comm: Communicator) -> None:
    sizes = [100, 64, 4096, 5000, 1, 70]
    lengths = [-(-size // 64) * 64 for size in sizes]
    n, starts = sum(lengths), np.cumsum([0, *lengths[:-1]])
    scale = np.repeat([1.0, 30.0, 0.01, 5.0, 1000.0, 0.3], lengths).astype(np.float32)
    real = np.concatenate([np.arange(length) < size for size, length in zip(sizes, lengths, strict=True)])
    aggregator = Marsit(7, residual=rule).start(comm, n, tensor_lengths=sizes)
    reference = OneRankMarsit(n, np.float32, rule, 7)
    running = np.full(len(sizes), np.nan)
    for t, u in enumerate(updates(n) * scale * real):
        g = aggregator.aggregate(u)
        if t % 7:
            steps = np.array([one_bit_step(part) for part in np.split(g, starts[1:])])
            np.testing.assert_allclose(steps, 4.0 * running, rtol=1e-6)
            steps = np.repeat(steps, lengths)
        else:
            steps = np.zeros(n, np.float32)
        np.testing.assert_array_equal(g, reference.aggregate(u, steps))
        np.testing.assert_array_equal(residual(aggregator), reference.c)
        means = np.add.reduceat(np.abs(u.astype(np.float64)), starts) / sizes
        running = means if t == 0 else 0.9 * running + 0.1 * means


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", ["own", "paper"])
def test_sixteen_bit_results_are_rounded_before_the_residual_sees_them(
    dtype: str, rule: Any, comm: Communicator
) -> None:
    aggregator = Marsit(7, residual=rule).start(comm, N, dtype=dtype)
    reference = OneRankMarsit(N, np.float32, rule, 7)
    kind = getattr(torch, dtype)
    for t, values in enumerate(updates()):
        u = torch.from_numpy(values).to(kind)
        g = aggregator.aggregate(u)
        wide = g.float().numpy()
        want = reference.aggregate(u.float().numpy(), one_bit_step(wide) if t % 7 else np.float32(0))
        np.testing.assert_array_equal(wide, torch.from_numpy(want).to(kind).float().numpy())
        np.testing.assert_array_equal(residual(aggregator), reference.c)


@pytest.mark.parametrize(
    "options",
    [
        Marsit(7),
        Marsit(7, residual="paper"),
        Marsit(None, gamma="auto"),
        Marsit(7, compensation=False),
        Marsit(None, compensation=False, global_step=0.5),
    ],
    ids=["own", "paper", "auto gamma", "no residual", "stateless"],
)
def test_pieces_give_what_the_whole_vector_gives(options: Marsit, comm: Communicator, pieces: Communicator) -> None:
    sizes = [100, 64, 4096, 5000, N - 9280 - 64]
    whole, cut = (options.start(communicator, N, tensor_lengths=sizes) for communicator in (comm, pieces))
    for u in updates():
        np.testing.assert_array_equal(whole.aggregate(u), cut.aggregate(u))
        assert whole.feedback.clipped_fraction == cut.feedback.clipped_fraction
    for (name, one), other in zip(whole.state_dict().items(), cut.state_dict().values(), strict=True):
        np.testing.assert_array_equal(one, other, name)


def test_a_long_vector_is_written_past_the_caches_with_the_same_values(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Marsit(None).start(comm, N)
    want = [plain.aggregate(u) for u in updates()]
    monkeypatch.setattr("mpicomp.codecs.sign_residual.STREAMING_ELEMENTS", 1)
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


def test_automatic_step_of_a_vector_of_zeros_is_zero(comm: Communicator) -> None:
    aggregator = Marsit(None).start(comm, 100, tensor_lengths=[64, 36])
    for _ in range(3):
        assert not aggregator.aggregate(np.zeros(100, np.float32)).any()


def test_automatic_gamma_rises_while_too_much_is_clipped_and_falls_otherwise(comm: Communicator) -> None:
    aggregator = Marsit(None, gamma="auto").start(comm, N)
    assert aggregator.feedback.gamma == 4
    rng, seen = np.random.default_rng(4), []
    for t in range(200):
        before = aggregator.feedback.gamma
        u = rng.standard_normal(N) * (1 if t < 100 else np.where(np.arange(N) % 8, 0.01, 40))
        aggregator.aggregate(u.astype(np.float32))
        change = math.log(aggregator.feedback.gamma / before)
        assert change == pytest.approx(0.2 * (aggregator.feedback.clipped_fraction - 0.015), abs=1e-12)
        seen.append(aggregator.feedback.gamma)
    assert seen[99] < 4 < seen[-1]


def test_automatic_gamma_stays_in_range(comm: Communicator) -> None:
    sparse = np.zeros(1000, np.float32)
    sparse[:700] = 1
    for u, bound in ((np.zeros(1000, np.float32), 0.25), (sparse, 16)):
        aggregator = Marsit(None, gamma="auto", clip=1e-3).start(comm, 1000)
        for _ in range(1200 if bound < 1 else 60):
            aggregator.aggregate(u)
        assert aggregator.feedback.gamma == bound
