"""Methods by name, and options that are refused with the values that would do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpicomp import Communicator
from mpicomp.algorithms import (
    ALGORITHMS,
    ECQSGD,
    QSGD,
    SSDM,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    Marsit,
    MemSGD,
    OneBitSGD,
    PowerSGD,
    RandomK,
    Relay,
    ScaleCom,
    TrueTopK,
    algorithm,
)
from mpicomp.codecs import COMPRESSORS, Clipping, Levels, OneBit, Quantizer, Ternary
from mpicomp.codecs.random_sparsification import RandomSparsification
from mpicomp.codecs.top_k import TopK

# Every option of every method and codec, with values that its type excludes.
OPTIONS = [
    pytest.param(made, field.name, str(field.type), id=f"{name} {field.name}")
    for name, made in (*ALGORITHMS.items(), *COMPRESSORS.items())
    for field in dataclasses.fields(made)
]
NOTHING: tuple[Any, ...] = ("nonsense", b"auto", [], (), {}, 1j, object(), float("nan"), -0.5, int)
NOTHING += (np.zeros(2), np.array(["l2"]))
OF_TYPES: dict[str, tuple[Any, ...]] = {
    "int": (2.5, 64.0, 1e3, "4", True, None, np.float32(64)),
    "int | None": (2.5, 64.0, "4", True, 0, -1, np.bool_(True)),
    "float": ("x", "0.5", True, None, -1),
    "float | None": ("x", True, 0, float("inf")),
    "float | Literal['auto']": ("x", True, None, 0, float("inf")),
    "bool": ("True", 0, 1, None, 2),
    "Codec | str": (3, None, True, OneBit, "zip", "one-bit:bucket=1e3", "one-bit:bucket=True", "clip:bits=16.5"),
    "Rates | None": (3, True, 2.5, (2.5,), (25, 2.5), (True,), (0,), "25", ((25,), 5), (25, (5,))),
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
    with pytest.raises(
        ValueError, match=r"no algorithm 'marsitt' \(did you mean 'marsit'\?\): choose one of dense, .*, auto"
    ):
        algorithm("marsitt")
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


INTEGER, SCALE = "an integer of 1 to 2^32", "a finite number above 0"
CHUNK = "None or a multiple of 50, up to 2^32"
# Values that are out of range though they are of the right type, and the condition on the options.
RANGES: list[tuple[Any, str, str, tuple[Any, ...]]] = [
    (Dense, "wire", "None or 'float16' or 'bfloat16'", ("fp16", "float32", 16)),
    (Marsit, "full_precision_every", "an integer of 1 or more, or None", (0, -1, 2.0, "auto")),
    (Marsit, "clip", "", (0,)),
    (Marsit, "winners", "", (0, 3, 1.0)),
    (partial(Marsit, residual="paper"), "winners", "None with residual='paper'", (1,)),
    (EFSignSGD, "bucket", "an integer of 1 or more, or None", (0, -1)),
    (SSDM, "momentum", "", (1, -0.1)),
    (ECQSGD, "alpha", SCALE, (0,)),
    (ECQSGD, "beta", "between 0 and 1", (1.5,)),
    (QSGD, "levels", "an integer of 1 to 127", (0, 200)),
    (OneBitSGD, "bucket", INTEGER, (0,)),
    (PowerSGD, "rank", "an integer of 1 to 1024", (0, 1025, 2.5)),
    (PowerSGD, "start_step", "an integer of 0 or more", (-1, 1.5)),
    *((one, "rate", "", (0, -1, 2.5)) for one in (ScaleCom, RandomK, TrueTopK)),
    *((one, "beta", "", (0, -0.5, 1.01)) for one in (ScaleCom, RandomK, TrueTopK)),
    *((one, "warmup_steps", "", (-1, 1.5)) for one in (ScaleCom, RandomK, TrueTopK)),
    *((partial(one, rate=50), "chunk", CHUNK, (0, 25, 75, -50, 50.0, True)) for one in (ScaleCom, TrueTopK, TopK)),
    *((partial(one, rate=50, exact=True), "chunk", "None with exact=True", (100,)) for one in (ScaleCom, TrueTopK)),
    *((one, "levels", "2 or 3 or 4 or 8 or 16 or 256", (0, 1, 5, 32, 255)) for one in (Relay, Levels)),
    *((one, "bucket", "a multiple of 64 up to 65536", (0, 100, 65600, True, "x")) for one in (Relay, Levels)),
    (Relay, "residual", "'own' or 'copy'", ("paper", None)),
    (Quantizer, "bucket", INTEGER, (0,)),
    (OneBit, "bucket", INTEGER, (2**32 + 1,)),
    (Quantizer, "levels", "an integer of 1 to 127", (0, 128)),
    (Quantizer, "norm", "'l2' or 'linf'", ("l3",)),
    (OneBit, "scale", "'l2' or 'l1'", ("linf",)),
    (Clipping, "bits", "an integer of 9 to 32", (8, 33)),
    (Ternary, "levels", "1", (2,)),
    (Ternary, "norm", "'linf'", ("l2",)),
    (TopK, "rate", INTEGER, (0, 2.5, True)),
    (TopK, "double", "True or False", ("yes",)),
    (RandomSparsification, "p", "above 0 and at most 1", (0, -0.1, 1.1)),
]


@pytest.mark.parametrize(("made", "option", "range_", "refused"), RANGES)
def test_options_out_of_range_are_refused_with_the_range(
    made: Any, option: str, range_: str, refused: tuple[Any, ...]
) -> None:
    for value in refused:
        with pytest.raises(ValueError, match=rf"^{option} must be {re.escape(range_)}.*not {re.escape(repr(value))}"):
            made(**{option: value})


@pytest.mark.parametrize(("made", "option", "kind"), OPTIONS)
def test_every_option_refuses_what_it_cannot_be(made: Any, option: str, kind: str) -> None:
    choices = [value for value in CHOICES if value is not None or "None" not in kind]
    for value in (*NOTHING, *(choices if kind.startswith("Literal") else OF_TYPES[kind])):
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


@pytest.mark.parametrize(
    "options",
    [
        {"full_precision_every": 1, "global_step": 1e-30, "gamma": 1e-30, "clip": float("inf")},
        {
            "full_precision_every": None,
            "global_step": "auto",
            "gamma": "auto",
            "residual": "paper",
            "nonfinite": "skip",
        },
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(options: dict[str, Any]) -> None:
    made = Marsit(**options)
    assert {name: getattr(made, name) for name in options} == options


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


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Marsit(k=3), r"Marsit has no option 'k' \(did you mean 'full_precision_every'\?\): it has full_prec"),
        (lambda: Marsit(full_precision_evry=3), r"'full_precision_evry' \(did you mean 'full_precision_every'\?\)"),
        (lambda: algorithm("marsit", tau=2.0), r"'tau' \(did you mean 'clip'\?\): .*, transactional$"),
        (lambda: Dense(wires="float16"), r"Dense has no option 'wires' \(did you mean 'wire'\?\): it has wire$"),
        (lambda: QSGD(xyz=1), "QSGD has no option 'xyz': it has levels, "),
    ],
)
def test_a_misspelt_option_is_told_with_the_nearest_one(make: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        make()


def test_options_are_copied_and_stored_as_before() -> None:
    for name in ALGORITHMS:
        made = algorithm(name)
        for copied in (
            copy.copy(made),
            copy.deepcopy(made),
            pickle.loads(pickle.dumps(made)),
            dataclasses.replace(made),
        ):
            assert copied == made
