"""The largest of each chunk on the GPU: the CPU's places and bits, whatever the values, lengths and ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs.top_k import count_kept

FLOATS = (np.float32, np.float64)
BITS = {np.float32: (np.uint32(0x7FFFFFFF), np.uint64(1 << 30)), np.float64: (np.uint64(2**63 - 1), np.uint64(1 << 62))}


def kinds(n: int, dtype: Any) -> dict[str, NDArray[Any]]:
    """Vectors for which selecting differs; the last one has a part of each."""
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n)
    tiny = float(np.finfo(dtype).smallest_subnormal)
    made = {
        "all magnitudes": normal * 10.0 ** rng.integers(-30, 31, n),
        "ties": rng.integers(-3, 4, n) * 0.5,
        "zeros of both signs": np.where(rng.random(n) < 0.5, 0.0, -0.0),
        "few": np.where(rng.random(n) < 0.01, normal, 0.0),
        "subnormal": rng.integers(-5, 6, n) * tiny,
        "infinity and NaN": np.where(rng.random(n) < 0.02, rng.choice([np.inf, -np.inf, np.nan], n), normal),
    }
    made["one after the other"] = np.concatenate([part[: -(-n // 6)] for part in made.values()])[:n]
    return {name: values.astype(dtype) for name, values in made.items()}


def cpu(
    x: NDArray[Any], residual: NDArray[Any] | None, chunk: int, keep: int, left: NDArray[Any] | None = None
) -> tuple[Any, Any, int]:
    """Indices, values and the largest magnitude; `left` as the kernels take it."""
    from mpicomp.kernels.cpu.top_k import largest, several

    indices, values = (
        np.empty(count_kept(x.size, chunk, keep), np.uint32),
        np.empty(count_kept(x.size, chunk, keep), x.dtype),
    )
    mask, high = BITS[x.dtype.type]
    if keep == 1:
        return indices, values, int(largest(x, residual, left, chunk, mask, indices, values))
    room = max(chunk, x.size) + 64
    work = np.empty(room, mask.dtype), np.empty(room, np.uint32), np.empty(room, mask.dtype)
    return indices, values, int(several(x, residual, left, chunk, keep, 1, mask, high, *work, indices, values))


def gpu(
    to_device: Any, to_host: Any, x: NDArray[Any], residual: NDArray[Any] | None, chunk: int, keep: int,
    left: Any = None,
) -> tuple[Any, Any, int]:  # fmt: skip
    """The same by the kernel for GPUs; `left` is the device's."""
    from mpicomp.kernels.gpu.top_k import largest, several

    count = count_kept(x.size, chunk, keep)
    indices, values = to_device(np.full(count, 77, np.int32)), to_device(np.full(count, np.nan, x.dtype))
    given = to_device(x), None if residual is None else to_device(residual), left, chunk
    mask, high = BITS[x.dtype.type]
    if keep == 1:
        most = largest(*given, mask, indices, values)
    else:
        most = several(*given, keep, 1, mask, high, None, None, None, indices, values)
    assert most.shape == ()
    return to_host(indices).view(np.uint32), to_host(values), int(most.item())


def assert_equal(found: tuple[Any, Any, int], expected: tuple[Any, Any, int], what: str) -> None:
    np.testing.assert_array_equal(found[0], expected[0], what)
    assert found[1].tobytes() == expected[1].tobytes(), what
    assert found[2] == expected[2], what


@pytest.fixture
def short_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have chunks of more than 1024 float32 or 512 float64 be long ones, which are divided among more programs."""
    for constant, value in (("top_k.LONGEST", 4096), ("radix_select.SEGMENT", 1024), ("radix_select.STEP", 256)):
        monkeypatch.setattr(f"mpicomp.kernels.gpu.{constant}", value)


# chunk and how many are kept
SHAPES = ((1, 1), (7, 1), (100, 1), (5003, 1), (2, 2), (10, 9), (100, 10), (1000, 333), (1024, 2), (6000, 60))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_short_chunks_have_the_places_and_values_of_the_cpus(
    to_device: Any, to_host: Any, shape: tuple[int, int], dtype: Any
) -> None:
    for n in (0, 1, 63, max(2500, 3 * shape[0] // 2)):
        x = kinds(n, dtype)["one after the other"]
        assert_equal(gpu(to_device, to_host, x, None, *shape), cpu(x, None, *shape), str(n))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(100, 1), (9000, 1), (100, 3), (17_600, 176)], ids=str)
def test_a_residual_is_added_on_the_fly(to_device: Any, to_host: Any, shape: tuple[int, int], dtype: Any) -> None:
    for n in (17_900, 1000):
        x, residual = kinds(n, dtype)["ties"], kinds(n + 1, dtype)["all magnitudes"][:n]
        assert_equal(gpu(to_device, to_host, x, residual, *shape), cpu(x, residual, *shape), str(n))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 1), (100, 1), (1600, 1), (100, 3), (1600, 16)], ids=str)
@pytest.mark.usefixtures("short_programs")
def test_the_sum_is_kept_where_it_is_asked_for(
    to_device: Any, to_host: Any, shape: tuple[int, int], dtype: Any
) -> None:
    for n in (3, 1000, 2100):
        x, residual = kinds(n, dtype)["ties"], kinds(n + 1, dtype)["all magnitudes"][:n]
        ours, theirs = np.full(n, 7, dtype), to_device(np.full(n, 7, dtype))
        expected = cpu(x, residual, *shape, left=ours)
        assert_equal(gpu(to_device, to_host, x, residual, *shape, left=theirs), expected, str(n))
        assert ours.tobytes() == (x + residual).tobytes()
        assert to_host(theirs).tobytes() == ours.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1600, 1), "ties"), ((2560, 1), "one after the other"), ((2560, 20), "one after the other"),
        # all segments have room for their candidates, none has, and one of three has
        ((1600, 16), "all magnitudes"), ((1600, 16), "ties"), ((2560, 1800), "one after the other"),
    ],
    ids=str,
)  # fmt: skip
def test_long_chunks_have_the_places_and_values_of_the_cpus(
    to_device: Any, to_host: Any, shape: tuple[int, int], name: str, dtype: Any
) -> None:
    x = kinds(shape[0] + 600, dtype)[name]  # two chunks, the last one short
    assert_equal(gpu(to_device, to_host, x, None, *shape), cpu(x, None, *shape), name)


@pytest.mark.parametrize("shape", [(100, 1), (1600, 1), (100, 3), (1600, 16)], ids=str)
@pytest.mark.usefixtures("short_programs")
def test_sums_that_are_not_finite_are_told_by_the_largest_magnitude(
    to_device: Any, to_host: Any, shape: tuple[int, int]
) -> None:
    x = np.full(2100, 3e38, np.float32)
    assert gpu(to_device, to_host, x, None, *shape)[2] < 0x7F800000
    assert gpu(to_device, to_host, x, x, *shape)[2] == 0x7F800000
    x = np.ones(2100, np.float32)
    x[2050] = np.nan
    indices, _, most = gpu(to_device, to_host, x, np.ones_like(x), *shape)
    assert most > 0x7F800000
    assert (indices < shape[0]).all()


@pytest.mark.timeout(60)
def test_a_nan_of_all_bits_among_zeros_ends(to_device: Any, to_host: Any) -> None:
    x = np.zeros(100, np.float32)  # whose last chunk is short
    x[70] = np.uint32(0x7FFFFFFF).view(np.float32)  # the NaN that GPUs compute
    assert_equal(gpu(to_device, to_host, x, None, 64, 3), cpu(x, None, 64, 3), "NaN")


@pytest.mark.parametrize("dtype", FLOATS)
def test_of_equal_magnitudes_in_many_pieces_of_a_chunk_the_first_counts(
    to_device: Any, to_host: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    monkeypatch.setattr("mpicomp.kernels.gpu.top_k.PIECES", 2)
    x = np.ones(40_000, dtype)
    x[[10_000, 20_000, 39_999]] = -3, 3, 3
    for shape in ((40_000, 1), (50_000, 1)):
        assert_equal(gpu(to_device, to_host, x, None, *shape), cpu(x, None, *shape), str(shape))
