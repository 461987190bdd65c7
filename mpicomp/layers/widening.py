"""Layer of 16-bit vectors: methods compute with float32 copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collectives.execution.call import Steps
from mpicomp.spaces import space_at

if TYPE_CHECKING:
    from mpicomp.aggregator.spec import VectorSpec


class Widening:
    """Reusable float32 copy of 16-bit vectors, in the space that encodes them."""

    def __init__(self, spec: VectorSpec) -> None:
        self._space, self._is_bfloat16 = space_at(spec.device), spec.dtype == "bfloat16"
        self._wide = self._space.empty(spec.n, "float32")

    def around(self, call: Any, steps: Callable[[Any], Steps]) -> Steps:
        """Return the steps of a call, which are made with the copy of its vector."""
        given, space = call.values, self._space
        call.values = call.wide = self._wide
        words = space.words(given)
        if space.is_host and not (words.flags.writeable and words.flags.aligned):
            words = words.copy()  # for which Numba would compile another form within the call
        space.launch(space.kernels.sixteen_bits.widen, words, self._is_bfloat16, self._wide)
        try:
            yield from steps(call)
        finally:  # the copy may have been overwritten; a repetition begins from the vector
            call.values, call.wide = given, None
