"""Methods by counts on one rank: the reference's results and states, unbiased draws, scales at the edge of a type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import NonFiniteGradient
from mpicomp import Communicator, redistribute, run_local
from mpicomp.algorithms.ef_signsgd import EFSignSGD
from mpicomp.algorithms.majority_vote import MajorityVote
from mpicomp.algorithms.ssdm import SSDM
from tests.reference import counts as reference
from tests.reference.statistics import assert_binomial

N, STEPS = 2 * 4096 + 77, 6
SEGMENTS = (65, 4096 + 1, 1, N - 128 - 4096 - 64 - 64)
DTYPES = (np.float16, np.float32, np.float64)
METHODS: dict[str, tuple[Any, Any]] = {
    "majority": (MajorityVote(seed=3), lambda *where: reference.Majority(*where, seed=3)),
    "ef-signsgd": (EFSignSGD(), reference.EFSign),
    "ef-signsgd, buckets": (EFSignSGD(bucket=500), lambda *where: reference.EFSign(*where, bucket=500)),
    "ssdm": (SSDM(seed=3), lambda *where: reference.StochasticSigns(*where, seed=3)),
    "ssdm, norm and momentum": (
        SSDM(momentum=0.9, scale="norm", coding="elias"),
        lambda *where: reference.StochasticSigns(*where, momentum=0.9, scale="norm"),
    ),
}
every_method = pytest.mark.parametrize("name", METHODS)


def gradients(steps: int = STEPS, n: int = N, dtype: Any = np.float32) -> NDArray[Any]:
    """One row a step; some zeros."""
    rows = np.random.default_rng(n).standard_normal((steps, n))
    rows[:, ::31] = 0
    return rows.astype(dtype)


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(), SEGMENTS])
@pytest.mark.parametrize("way", ["comm", "pieces"])
def test_results_and_states_are_the_reference_s(
    name: str, dtype: Any, lengths: tuple[int, ...], way: str, request: pytest.FixtureRequest
) -> None:
    options, simulation = METHODS[name]
    aggregator = options.start(request.getfixturevalue(way), N, dtype=dtype, tensor_lengths=lengths or None)
    expected = simulation(1, N, dtype, lengths if name != "majority" else ())
    padding = expected.spread(expected.lengths) == 0
    for g in gradients(dtype=dtype):
        g[padding] = 0
        result = aggregator.aggregate(g)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, expected.step(g[None]))
        state = aggregator.state_dict()
        for key, value in expected.state(0).items():
            np.testing.assert_array_equal(state[key], value)


@every_method
@pytest.mark.parametrize("n", [1, 63, 64, 65, 5 << 20])
def test_short_vectors_and_those_that_are_written_past_the_caches(name: str, n: int, comm: Communicator) -> None:
    if n > N and name.startswith("ssdm"):
        pytest.skip("the reference takes long to draw so many signs, and values are written as ef-signsgd's are")
    options, simulation = METHODS[name]
    aggregator, expected = options.start(comm, n), simulation(1, n)
    for g in gradients(2, n):
        np.testing.assert_array_equal(aggregator.aggregate(g), expected.step(g[None]))


@every_method
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_changes_nothing(name: str, bad: float, comm: Communicator) -> None:
    options, _ = METHODS[name]
    tried, untried = options.start(comm, N, vector_id=4), options.start(comm, N, vector_id=4)
    for step, g in enumerate(gradients()):
        spoiled = g.copy()
        spoiled[[0, 4095, N - 1][step % 3]] = bad
        before = tried.state_dict()
        with pytest.raises(NonFiniteGradient, match=f"vector 4, step {step}, from rank 0;") as caught:
            tried.aggregate(spoiled)
        assert caught.value.ranks == (0,)
        for key, value in tried.state_dict().items():
            np.testing.assert_array_equal(value, before[key])
        np.testing.assert_array_equal(tried.aggregate(g), untried.aggregate(g))


@pytest.mark.parametrize(("options", "told"), [(EFSignSGD(), "the scale of"), (SSDM(scale="norm"), "the norm of")])
def test_scales_beyond_the_results_type_are_told(options: Any, told: str, comm: Communicator) -> None:
    aggregator = options.start(comm, 4, dtype=np.float16)
    large = np.full(4, 6e4, np.float16)
    if isinstance(options, EFSignSGD):
        large[:] = 1
        aggregator.load_state_dict(aggregator.state_dict() | {"residual": np.full(4, 7e4, np.float32)})
    before = aggregator.state_dict()
    with pytest.raises(NonFiniteGradient, match=f"{told} vector 0, step 0, from no rank") as caught:
        aggregator.aggregate(large)
    assert caught.value.ranks == ()
    np.testing.assert_equal(aggregator.state_dict(), before)


@pytest.mark.parametrize("bucket", [0, -1, 1.5, True, "all"])
def test_a_bucket_out_of_range_is_refused(bucket: Any) -> None:
    with pytest.raises(ValueError, match=f"^bucket must be an integer of 1 or more, or None, not {bucket!r}$"):
        EFSignSGD(bucket)


def test_a_bucket_longer_than_the_vector_is_the_whole_of_it(comm: Communicator) -> None:
    g, (whole, longer) = gradients()[0], (EFSignSGD(bucket).start(comm, N) for bucket in (None, 10 * N))
    np.testing.assert_array_equal(whole.aggregate(g), longer.aggregate(g))
    assert EFSignSGD(5).start(comm, 0).aggregate(np.zeros(0, np.float32)).size == 0


def test_what_is_pending_in_buckets_goes_to_other_numbers_of_ranks() -> None:
    """The mean of the residuals, for other buckets too: none of it is lost."""

    def taken(comm: Any, bucket: int | None, states: Any) -> dict[str, Any]:
        aggregator = EFSignSGD(bucket).start(comm, N)
        if states is not None:
            aggregator.load_state_dict(states[comm.rank])
        else:
            for g in gradients():
                aggregator.aggregate(g * (comm.rank + 1))
        return aggregator.state_dict()

    old = run_local(3, lambda comm: taken(comm, 500, None))
    kinds = run_local(1, lambda comm: EFSignSGD(500).start(comm, N).state_kinds)[0]
    moved = redistribute(old, 2, kinds)
    new = run_local(2, lambda comm: taken(comm, 7, moved))
    before, after = (np.mean([state["residual"] for state in states], axis=0, dtype=float) for states in (old, new))
    assert np.abs(before).max() > 0
    np.testing.assert_allclose(after, before, rtol=2**-23)


def test_the_largest_numbers_have_finite_norms_and_results(comm: Communicator) -> None:
    for dtype in (np.float32, np.float64):
        largest = np.finfo(dtype).max if dtype == np.float32 else 1e150
        for options in (EFSignSGD(), SSDM(), SSDM(scale="norm"), MajorityVote()):
            assert np.isfinite(options.start(comm, 1000, dtype=dtype).aggregate(np.full(1000, largest, dtype))).all()


@pytest.mark.parametrize("scale", ["none", "norm"])
def test_a_vector_of_zeros_gives_zeros(scale: str, comm: Communicator) -> None:
    for n in (1, N):
        assert not SSDM(scale=scale).start(comm, n).aggregate(np.zeros(n, np.float32)).any()
    half = np.zeros(256, np.float32)
    half[:128] = 1
    result = SSDM(scale=scale).start(comm, 256, tensor_lengths=(128, 128)).aggregate(half)
    assert result[:128].all()
    assert not result[128:].any()
    assert not EFSignSGD().start(comm, N).aggregate(np.zeros(N, np.float32)).any()


def test_zeros_of_the_majority_alternate_from_step_to_step(comm: Communicator) -> None:
    aggregator, zeros = MajorityVote().start(comm, N), np.zeros(N, np.float32)
    even, odd = aggregator.aggregate(zeros), aggregator.aggregate(zeros)
    np.testing.assert_array_equal(even, np.where(np.arange(N) % 2, 1, -1))
    np.testing.assert_array_equal(odd, -even)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_mean_over_steps_is_the_vector(momentum: float, comm: Communicator) -> None:
    """With momentum, what it has settled to."""
    x, steps = np.array([0.75, -0.5, 0.25, 0.0, -0.125, 0.3], np.float32), 4000
    aggregator = SSDM(momentum=momentum, scale="norm", seed=1).start(comm, 6)
    for _ in range(60 if momentum else 0):
        aggregator.aggregate(x)
    norm = float(np.linalg.norm(x.astype(np.float64)).astype(np.float32))
    ups = np.zeros(6, int)
    for _ in range(steps):
        result = aggregator.aggregate(x)
        assert (np.abs(result) == np.float32(norm)).all()
        ups += result > 0
    for i, value in enumerate(x):
        assert_binomial(ups[i], steps, 0.5 + float(value) / (2 * norm), f"element {i}")


def test_seeds_vectors_and_steps_draw_differently(comm: Communicator) -> None:
    x = np.zeros(N, np.float32)
    x[[0, -1]] = 1
    first = SSDM().start(comm, N)
    one = first.aggregate(x)
    for other in (first, SSDM(seed=1).start(comm, N), SSDM().start(comm, N, vector_id=1)):
        assert_binomial((other.aggregate(x) == one)[1:-1].sum(), N - 2, 0.5, "equal signs")


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ("momentum", (1, -0.1, float("nan"), "0.9", None)),
        ("scale", ("l2", None)),
        ("coding", ("huffman", True)),
        ("seed", (1.5, "1")),
    ],
)
def test_options_out_of_range_are_refused_by_name_and_value(option: str, refused: tuple[Any, ...]) -> None:
    for value in refused:
        with pytest.raises(ValueError, match=f"^{option} must be .* not {value!r}$"):
            SSDM(**{option: value})
    with pytest.raises(ValueError, match=r"^seed must be an integer, not 0\.5$"):
        MajorityVote(seed=0.5)  # type: ignore[arg-type]


def test_a_state_of_other_shape_or_not_finite_is_refused_whole(comm: Communicator) -> None:
    for options, key in ((EFSignSGD(), "residual"), (SSDM(momentum=0.5), "momentum")):
        aggregator = options.start(comm, N)
        aggregator.aggregate(gradients(1)[0])
        before = aggregator.state_dict()
        for wrong, told in (
            (np.zeros(1, np.float32), "has shape"),
            (np.full(N, np.nan, np.float32), "NaN or infinity"),
        ):
            with pytest.raises(ValueError, match=f"{key} .*{told}" if told != "has shape" else f"{key} {told}"):
                aggregator.load_state_dict(before | {key: wrong, "step": 0})
        np.testing.assert_equal(aggregator.state_dict(), before)
    with pytest.raises(ValueError, match="is not one of"):
        SSDM().start(comm, N).load_state_dict(before)
