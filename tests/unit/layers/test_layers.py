"""Layers around the steps of a call: who needs none passes none, and 16-bit vectors are widened exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpicomp
from apps.performance.step_path import called
from collectives.arrays.elements import storage, widen
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.layers.widening import Widening


@pytest.mark.parametrize("method", [mpicomp.Marsit(None), mpicomp.QSGD(), mpicomp.Dense()], ids=str)
def test_a_call_with_float32_arrays_of_the_host_passes_no_layer(method: Any) -> None:
    with mpicomp.Communicator() as comm:
        assert [name for name in called(method, comm, 1000) if "layers/" in name or "staged" in name] == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_see_an_exact_copy_that_is_gone_when_they_end(dtype: str) -> None:
    codes = np.arange(1 << 16).astype(np.uint16)
    given, expected = codes.view(storage(dtype)), np.empty(codes.size, np.float32)
    widen(given, dtype, expected)
    call = SimpleNamespace(values=given, wide=None)

    def steps(call: Any) -> Any:
        assert call.values is call.wide
        np.testing.assert_array_equal(call.wide.view(np.uint32), expected.view(np.uint32))
        yield True
        raise KeyError

    layer = Widening(VectorSpec(codes.size, dtype)).around(call, steps)
    assert next(layer)
    with pytest.raises(KeyError):
        next(layer)
    assert call.values is given
    assert call.wide is None
