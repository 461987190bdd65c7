"""Effects of the option of Dense other than the result."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.schedules.star import Direct
from mpicomp import Dense


def test_in_full_precision_it_calls_itself_as_it_did_before_it_had_an_option() -> None:
    """Ranks compare the text, and optimizers sort parameters into buckets by it."""
    assert repr(Dense()) == repr(Dense(wire=None)) == "Dense()"
    assert repr(Dense(wire="float16")) == "Dense(wire='float16')"


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_advice_counts_two_bytes_an_element_each_way_and_takes_the_way_that_is_gone(wire: Any, dtype: str) -> None:
    model = Dense(wire=wire).message_model(10_000_000, dtype, 4, 1 << 20)
    assert [model.nbytes(1000, weight) for weight in (1, 4)] == [2000, 2000]
    assert model.nbytes(model.piece_elements, 4) <= 1 << 20
    assert model.route == Direct()
