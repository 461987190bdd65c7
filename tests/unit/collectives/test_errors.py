"""An error with another text is of the same type, and nothing is lost where a type takes other arguments."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.errors import OutOfMemory, reword


@pytest.mark.parametrize("kind", [ValueError, TypeError, MemoryError, OutOfMemory])
def test_an_error_is_reworded_in_its_type(kind: type[Exception]) -> None:
    assert type(reword(kind("before"), "after")) is kind
    assert str(reword(kind("before"), "after")) == "after"


def test_missing_memory_of_numpy_is_reworded_as_the_built_in_error() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 60, np.uint8)
    assert type(caught.value) is not MemoryError
    assert repr(reword(caught.value, "rank 1 of 2")) == "MemoryError('rank 1 of 2')"
