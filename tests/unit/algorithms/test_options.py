"""Methods by name, and options that are refused with a sentence that says what would do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mpicomp import Communicator
from mpicomp.algorithms import ALGORITHMS, CascadingSSDM, Dense, Marsit, algorithm


def test_methods_are_found_by_name() -> None:
    assert algorithm("dense") == Dense()
    assert algorithm("marsit", full_precision_every=None, seed=3) == Marsit(full_precision_every=None, seed=3)
    assert algorithm("cascading-ssdm", normalise=True) == CascadingSSDM(normalise=True)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no algorithm 'marsitt': choose one of dense, marsit, cascading-ssdm"):
        algorithm("marsitt")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="full_precision"):
        algorithm("marsit", full_precision=3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_are_frozen_and_hashable(name: str) -> None:
    options: Any = algorithm(name)
    assert hash(options) == hash(algorithm(name))
    assert options.synchronize in ("updates", "gradients")
    assert type(options).__name__ in repr(options)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 1


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ("full_precision_every", (0, -1, 2.0, "auto")),
        ("global_step", (0, -1.0, float("inf"), float("nan"), "automatic", None)),
        ("gamma", (0, -2, float("inf"), float("nan"), "own")),
        ("clip", (0, -1.0, float("nan"), "1")),
        ("seed", (1.5, "1")),
        ("residual", ("mine", None)),
        ("nonfinite", ("ignore", None)),
    ],
)
def test_options_out_of_range_are_refused_by_name_and_value(option: str, refused: tuple[Any, ...]) -> None:
    for value in refused:
        with pytest.raises(ValueError, match=f"^{option} must be .* not {value!r}$"):
            Marsit(**{option: value})


def test_what_is_just_in_range_is_taken() -> None:
    Marsit(full_precision_every=1, global_step=1e-30, gamma=1e-30, clip=float("inf"))
    Marsit(full_precision_every=None, global_step="auto", gamma="auto", residual="paper", nonfinite="skip")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_vectors_that_cannot_be_are_refused_at_the_start(name: str, comm: Communicator) -> None:
    with pytest.raises(TypeError, match="vectors of type int32: choose one of float16, bfloat16, float32, float64"):
        algorithm(name).start(comm, 10, dtype="int32")
    with pytest.raises(ValueError, match="0 or more elements, not -1"):
        algorithm(name).start(comm, -1)


def test_a_global_step_beyond_the_type_is_refused_at_the_start(comm: Communicator) -> None:
    Marsit(global_step=1e300).start(comm, 10, dtype="float64")
    with pytest.raises(ValueError, match=r"global_step=1e\+300 is beyond what float32 holds"):
        Marsit(global_step=1e300).start(comm, 10)


@pytest.mark.parametrize("name", ["double-squeeze", "mem-sgd"])
def test_no_message_of_two_passes_is_longer_than_a_piece(name: str) -> None:
    """MEM-SGD sends whole floats back, 32 times as many bytes as it gets."""
    for piece_bytes in (57_000, 200_000, 1_000_000):
        wire = algorithm(name).wire(10_000_000, "float32", 4, piece_bytes)
        longest = max(wire.nbytes(wire.piece_elements, weight) for weight in (1, 4))
        assert longest <= piece_bytes or wire.piece_elements == wire.alignment
