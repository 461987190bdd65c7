"""Parameters that stages of a pipeline share, such as an embedding that is the output layer too."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.pipeline.agreement import PipelineError, exchange
from mpicomp.pipeline.tensors import as_bytes

_TAG = 22  # above those of cuts, pairs and weights
_CHECK_EVERY = 100  # steps: a checksum reads all of the parameters
_CHECKED = (0, 1, 8)  # of these: the first steps show options that differ, the ninth after gradients of 2 to 8 steps


class TiedParameters:
    """Parameters that a stage shares with other stages by name; PipelineError on all stages if they differ."""

    def __init__(self, comm: Communicator, tied: Mapping[str, nn.Parameter], deferred: bool) -> None:
        # deferred: `sum_averaged` sums after the average over replicas, instead of `add_gradients` in each step
        self._comm, self._parameters, self._deferred = comm, dict(tied), deferred
        self._due = False  # steps were made whose averaged gradients are not yet summed
        self._steps = 0  # made together: stages may have loaded states of different steps
        self._before: dict[str, Tensor | None] = {}
        wrong = {name for name, one in tied.items() if not isinstance(one, nn.Parameter)}
        mine = {
            name: "no parameter" if name in wrong else f"{one.dtype}{list(one.shape)}" for name, one in tied.items()
        }
        everyones = comm.allgather_object(mine)
        self._stages = {
            name: [stage for stage, theirs in enumerate(everyones) if name in theirs]
            for name in sorted({name for theirs in everyones for name in theirs})
        }
        for name, stages in self._stages.items():
            held = {everyones[stage][name] for stage in stages}
            if (len(stages) < 2 <= comm.size) or len(held) > 1 or "no parameter" in held:
                listed = ", ".join(f"stage {stage}: {everyones[stage][name]}" for stage in stages)
                raise PipelineError(
                    f"{comm.here}: the tied parameter {name!r} must be one of the same shape and type on two stages or "
                    f"more, and it is {listed}: pass it in tied= on all stages that share it"
                )
        for name, stages in self._find_shared():
            with torch.no_grad():
                self._parameters[name].copy_(self._everyones(stages, self._parameters[name])[0])

    def begin(self) -> None:
        """Set gradients of earlier steps aside, and compare the parameters now and then; collective over the stages."""
        self._before = {}
        if not self._deferred:
            for name, one in self._parameters.items():
                self._before[name], one.grad = one.grad, None
        if not self._stages or self._steps % _CHECK_EVERY not in _CHECKED:
            return
        sums = {name: zlib.crc32(as_bytes(one).data) for name, one in self._parameters.items()}
        everyones = self._comm.allgather_object(sums)
        for name, stages in self._stages.items():
            if len({everyones[stage][name] for stage in stages}) > 1:
                cure = "call sum_tied_gradients() between synchronize() and each step of the optimizer, "
                raise PipelineError(
                    f"{self._comm.here}: the tied parameter {name!r} differs between the stages {stages}: "
                    f"{cure if self._deferred else ''}load one checkpoint on all of them, and give it the same "
                    "optimizer and options there"
                )

    def add_gradients(self) -> None:
        """Add the sum of the step's gradients to those before, on all stages that share a parameter."""
        self._steps += 1
        if self._deferred:
            self._due = True
            return
        for name, stages in self._find_shared():
            one, before = self._parameters[name], self._before.pop(name)
            total = self._gradient_sum(one, stages)
            one.grad = total if before is None else before.add_(total)

    @torch.no_grad()
    def sum_averaged(self) -> None:
        """Replace the gradients by their sum over the stages that share a parameter; collective over the stages."""
        if not self._due:
            cure = "call sum_tied_gradients() once after each synchronize() of the optimizer"
            if not self._deferred:
                cure = "step() has summed them, as the pipeline was made without everyone="
            raise PipelineError(f"{self._comm.here}: there are no gradients of tied parameters to sum: {cure}")
        self._due = False
        for name, stages in self._find_shared():
            one = self._parameters[name]
            total = self._gradient_sum(one, stages)
            if one.grad is None or one.grad.is_sparse:
                one.grad = total
            else:
                one.grad.copy_(total)  # in place: the optimizer gave this tensor out

    def _find_shared(self) -> list[tuple[str, list[int]]]:
        """Return the parameters of this stage and the stages that share them, in an order that all have in common."""
        return [(name, stages) for name, stages in self._stages.items() if name in self._parameters]

    def _gradient_sum(self, parameter: nn.Parameter, stages: list[int]) -> Tensor:
        gradient = parameter.grad
        mine = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
        total, *others = self._everyones(stages, mine.detach())
        for other in others:  # in the order of the stages, so that all have the same bits
            total = total + other
        return total

    def _everyones(self, stages: list[int], mine: Tensor) -> list[Tensor]:
        """Return a tensor of each of the stages."""
        found = []
        for stage in stages:
            if stage == self._comm.rank:
                found.append(mine.detach().clone())
                continue
            theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
            exchange(self._comm, stage, _TAG, as_bytes(mine), as_bytes(theirs))
            found.append(theirs)
        return found
