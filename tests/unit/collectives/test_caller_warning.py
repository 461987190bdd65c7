"""Warnings name the line of the user's program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from collectives.caller_warning import warn_caller


def made(module: str, source: str, **names: Any) -> Callable[[], object]:
    """Return the function ``work`` that another module's source defines."""
    found = {"__name__": module, **names}
    exec(source, found)
    return found["work"]  # type: ignore[no-any-return]


def file_of_warning(work: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    (one,) = caught
    assert issubclass(one.category, RuntimeWarning)
    return one.filename


@pytest.mark.parametrize("depth", [0, 1, 7])
@pytest.mark.parametrize(
    "module", ["mpicomp.algorithms.marsit", "collectives.execution.handle", "torch.optim", "mpicomp"]
)
def test_frames_of_the_library_are_passed_however_many_they_are(module: str, depth: int) -> None:
    work = made(module, "def work(): warn('text')", warn=warn_caller)
    for _ in range(depth):
        work = made(module, "def work(): inner()", inner=work)
    assert file_of_warning(work) == __file__


def test_the_last_call_of_a_user_is_named_not_the_first() -> None:
    inner = made("mpicomp.step", "def work(): warn('text')", warn=warn_caller)
    loop = made("train", "def work(): inner()", inner=inner)
    assert file_of_warning(made("mpicomp.demo", "def work(): loop()", loop=loop)) == "<string>"


def test_steps_of_a_generator_are_passed() -> None:
    source = "def steps():\n    warn('text')\n    yield\ndef work(): next(steps())"
    assert file_of_warning(made("mpicomp.aggregator.step", source, warn=warn_caller)) == __file__
