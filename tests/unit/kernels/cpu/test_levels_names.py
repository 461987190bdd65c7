"""Names of the compiled kernels of few levels."""

from __future__ import annotations

import pytest
from numba.core.dispatcher import Dispatcher

from mpicomp.kernels.cpu.levels import OF_LEVELS


@pytest.mark.parametrize("count", OF_LEVELS)
def test_functions_in_which_the_number_of_levels_is_a_constant_have_it_in_their_names(count: int) -> None:
    # compiled forms are loaded by name: without the number, one process ran the kernels of another number
    pending, found = [*OF_LEVELS[count]], set()
    while pending:
        function = pending.pop().py_func
        found.add(function.__qualname__)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        inlined = [one for one in cells if isinstance(one, Dispatcher) and one.targetoptions.get("inline") == "always"]
        pending += [one for one in cells if isinstance(one, Dispatcher) and one not in inlined]
    assert len(found) >= 4
    assert all(name.endswith(f"_{count}") for name in found), found
