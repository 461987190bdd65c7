"""Methods by name, and options that are refused with a sentence that says what would do."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from mpicomp import Communicator
from mpicomp.algorithms import ALGORITHMS, CascadingSSDM, Dense, DoubleSqueeze, Marsit, MemSGD, algorithm
from mpicomp.codecs import COMPRESSORS, OneBit

# Every option of every method and codec, and what its type says that it may not be.
OPTIONS = [
    pytest.param(made, field.name, str(field.type), id=f"{name} {field.name}")
    for name, made in (*ALGORITHMS.items(), *COMPRESSORS.items())
    for field in dataclasses.fields(made)
]
NOTHING: tuple[Any, ...] = (
    "nonsense",
    b"auto",
    [],
    (),
    {},
    1j,
    object(),
    np.zeros(2),
    np.array(["l2"]),
    float("nan"),
    -0.5,
    int,
)
OF_TYPES: dict[str, tuple[Any, ...]] = {
    "int": (2.5, 64.0, 1e3, "4", True, None, np.float32(64)),
    "int | None": (2.5, 64.0, "4", True, 0, -1, np.bool_(True)),
    "float": ("x", "0.5", True, None, -1),
    "float | None": ("x", True, 0, float("inf")),
    "float | Literal['auto']": ("x", True, None, 0, float("inf")),
    "bool": ("True", 0, 1, None, 2),
    "Codec | str": (3, None, True, OneBit, "zip", "one-bit:bucket=1e3", "one-bit:bucket=True", "clip:bits=16.5"),
    "Rates | None": (3, True, 2.5, (2.5,), (True,), "25", ((25,), 5)),
}
CHOICES = (None, True, 3, "L2", "")
NUMPYS = {int: np.int64, float: np.float64, str: np.str_}
OF_NUMPY = [
    pytest.param(made, field.name, value, id=f"{name} {field.name}")
    for name, made in (*ALGORITHMS.items(), *COMPRESSORS.items())
    for field in dataclasses.fields(made)
    if type(value := 100 if field.type == "int | None" else field.default) in NUMPYS
]


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


@pytest.mark.parametrize(("made", "option", "kind"), OPTIONS)
def test_every_option_refuses_what_it_cannot_be(made: Any, option: str, kind: str) -> None:
    for value in (*NOTHING, *(CHOICES if kind.startswith("Literal") else OF_TYPES[kind])):
        # of rates the first that is wrong, of compressors by name what is wrong about them
        told = rf"^{option} must be .+, not {re.escape(repr(value))}$"
        if kind == "Rates | None":
            told = r"^rates must be .+, not "
        if kind == "Codec | str" and isinstance(value, str):
            told = rf"^there is no compressor '{value}'|^compressor '{value}': \w+ must be .+, not "
        with pytest.raises(ValueError, match=told):
            made(**{option: value})


@pytest.mark.parametrize(("made", "option", "value"), OF_NUMPY)
def test_numbers_and_texts_of_numpy_are_stored_as_pythons(
    made: Any, option: str, value: Any, comm: Communicator
) -> None:
    """Else ranks that take them from arrays would differ from others, and arithmetic would overflow or fail."""
    given = NUMPYS[type(value)](value)
    one, other = made(**{option: given}), made(**{option: value})
    assert repr(one) == repr(other)
    assert type(getattr(one, option)) is type(value)
    if hasattr(one, "start"):
        vector = np.linspace(-1, 1, 300, dtype=np.float32)
        found, expected = (options.start(comm, 300).aggregate(vector) for options in (one, other))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("method", [DoubleSqueeze, MemSGD])
def test_compressors_take_true_false_and_none_by_name(method: Any) -> None:
    codec = method("top-k:rate=10,chunk=None,double=True").compressor
    assert (codec.rate, codec.chunk, codec.double) == (10, None, True)


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
        wire = algorithm(name).message_model(10_000_000, "float32", 4, piece_bytes)
        longest = max(wire.nbytes(wire.piece_elements, weight) for weight in (1, 4))
        assert longest <= piece_bytes or wire.piece_elements == wire.alignment
