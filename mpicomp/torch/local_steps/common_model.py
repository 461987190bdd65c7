"""The common model of all ranks, while each rank's optimizer moves a copy of its own.

Before its first step after a synchronization a parameter *steps aside*: its data become a copy in other memory, and the
values that all ranks have stay where they were. After the synchronization it returns to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.parameters import NamedParameter


class CommonModel:
    """The common values of the parameters that are aside.

    Parameters
    ----------
    in_vectors
        Parameters step aside into the vectors of their reducers, which no other reducer shares.

    Attributes
    ----------
    values : dict
        Common values, by the parameters that are aside.
    is_shown : bool
        The parameters hold the common model for a while.
    """

    def __init__(self, in_vectors: bool) -> None:
        self.values: dict[Tensor, Tensor] = {}
        self.is_shown = False
        self._in_vectors = in_vectors
        self._memory: list[list[Tensor]] = []  # of each bucket, like its parameters
        self._without_bucket: set[Tensor] = set()

    def has_moved(self, reducer: BucketReducer) -> bool:
        """Return True if a bucket's parameters are aside."""
        return reducer.parameters[0] in self.values

    def step_aside(self, reducer: BucketReducer, reducers: Sequence[BucketReducer]) -> None:
        """Give a bucket's parameters a copy of themselves in other memory, for the optimizer to move."""
        self._memory += [self._memory_of(one) for one in reducers[len(self._memory) :]]
        self.restore(one for one in reducer.parameters if one in self.values)  # from a step that failed in backward
        memory = self._memory[reducer.bucket.index]
        for i, (own, parameter) in enumerate(zip(memory, reducer.parameters, strict=True)):
            # a copy would hide a change of form, which the step that synchronizes refuses
            if own.shape != parameter.shape or own.dtype is not parameter.dtype or own.device != parameter.device:
                memory[i] = torch.empty_like(parameter)
        torch._foreach_copy_(memory, reducer.parameters)
        self.move_aside(reducer.parameters, memory)

    def move_aside(self, parameters: Iterable[Tensor], local: Iterable[Tensor]) -> None:
        """Let the parameters hold `local` values, and keep those that they hold as the common ones."""
        for parameter, one in zip(parameters, local, strict=True):
            self.values[parameter], parameter.data = parameter.data, one

    def step_aside_joining(self, parameters: Iterable[Tensor]) -> None:
        """Let parameters step aside that join, and have no bucket yet, in whichever local step they come."""
        for parameter in parameters:
            if parameter not in self.values:
                self._without_bucket.add(parameter)
                self.values[parameter], parameter.data = parameter.data, parameter.data.clone()

    def restore_all_joining_but(self, joining: Iterable[Tensor]) -> None:
        """Return those parameters without a bucket that do not join any more: frozen again, or removed."""
        self.restore(self._without_bucket.difference(joining))

    def keep_aside(self, parameters: Iterable[Tensor]) -> None:
        """Count these of the parameters without a bucket, which have one now, among the others."""
        self._without_bucket.difference_update(parameters)

    def restore(self, parameters: Iterable[Tensor]) -> None:
        """Let these parameters, which are aside, hold the common values again."""
        for parameter in parameters:
            parameter.data = self.values.pop(parameter)
            self._without_bucket.discard(parameter)

    def restore_all(self) -> None:
        """Let all parameters hold the common values again."""
        self.restore(tuple(self.values))

    def forget_moves(self) -> None:
        """Let all parameters return, and take their values as common ones: a model that was loaded, or will be."""
        for parameter, common in self.values.items():
            common.copy_(parameter)
        self.restore_all()
        self._memory.clear()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the parameters hold the common values for a while."""
        local = {parameter: parameter.data for parameter in self.values}
        self.is_shown = True
        try:
            _hold(self.values)
            yield
        finally:
            _hold(local)
            self.is_shown = False

    def named(self, members: Iterable[NamedParameter]) -> dict[str, Tensor]:
        """Return the common values of those members that are aside, by name; no copies."""
        return {one.name: self.values[one.parameter] for one in members if one.parameter in self.values}

    def _memory_of(self, reducer: BucketReducer) -> list[Tensor]:
        """Return memory for a bucket's parameters; not in the vector for those with another order of elements."""
        pairs = zip(reducer.parameters, reducer.fresh_vector_views(), strict=True)
        return [view if self._in_vectors and one.is_contiguous() else torch.empty_like(one) for one, view in pairs]


def _hold(values: Mapping[Tensor, Tensor]) -> None:
    for parameter, tensor in values.items():
        parameter.data = tensor
