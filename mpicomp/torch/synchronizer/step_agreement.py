"""Agreement of the ranks on each step: the same optimizer, the same options, the same model, and no rank refusing.

Four numbers per rank are summed in the messages by which one bucket's call is compared anyway, so that they cost
nothing: the three counts of `StepIntent`, and a fingerprint of the options and the model. Only where the sums show a
difference do the ranks exchange descriptions. All of them then raise in the same step, with no call in flight, and no
rank makes the step.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from collectives.arrays.tensor_bytes import tensor_bytes
from collectives.consistency.descriptions import fingerprint
from collectives.errors import CollectiveMismatch, marked
from collectives.quoting import one_line
from mpicomp.aggregator.base import Aggregator
from mpicomp.torch.parameters import LISTS, NamedParameter, ParameterGroup
from mpicomp.torch.replication import require_same_layout
from mpicomp.torch.synchronizer.parameter_changes import PLACES, ParameterChanges
from mpicomp.torch.synchronizer.step_differences import (
    RankDescription,
    can_change,
    first_difference,
    option_text,
    plain_option,
)

SAMPLE_ELEMENTS = 1024
DEVICE_SAMPLE_STEPS = 64
"""Steps between two samples of parameters on a device, since the host waits for the device to read one."""
SET_BY_USERS = frozenset(
    ("lr", "initial_lr", "momentum", "dampening", "nesterov", "betas", "alpha", "eps", "weight_decay", "maximize")
)
"""Options that are compared under "updates", where optimizers such as Prodigy keep estimates of a rank's own."""

_MASK = (1 << 62) - 1
_WORD = (1 << 64) - 1


@dataclass(eq=False)
class StepIntent:
    """The part that this rank takes in a step."""

    refusal: Exception | None = None
    """Error by which this rank cannot make the step. It takes part in the calls that others have begun, by zeros."""
    drops: bool = False
    """Flag: this rank drops the step's gradients."""
    emptied: bool = False
    """Flag: this rank makes the step without gradients, since `zero_grad` has dropped them."""

    @property
    def is_silent(self) -> bool:
        """Flag: this rank sends zeros."""
        return self.drops or self.refusal is not None

    @property
    def counts(self) -> tuple[int, int, int]:
        """Share of this rank in the counts of refusals, dropped steps and emptied steps."""
        return self.refusal is not None, self.drops, self.emptied


def open_agreement(
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    members: Sequence[NamedParameter],
    options: str,
    all_options: bool,
    outer: torch.optim.Optimizer | None = None,
) -> StepAgreement:
    """Return the agreement of ranks that have the same `options`, parameters and optimizers; collective.

    Raises
    ------
    CollectiveMismatch
        The ranks' options differ, their optimizers in class or options, or their parameters in name, shape or dtype.
    """
    comm.agree(fingerprint(options), lambda: options)
    # A CPU rounds some steps of optimizers in another way than a GPU, and the ranks' models would diverge.
    kinds = sorted({member.parameter.device.type for member in members})
    named = {member.name: member.parameter for member in members}
    require_same_layout(named, comm, f" on {' and '.join(kinds)}")
    agreement = StepAgreement(optimizer, comm, members, all_options, outer)
    agreement.require_same_options()
    return agreement


class StepAgreement:
    """Comparison of the ranks' optimizers at each step, and of the parameters that are added, unfrozen or frozen.

    `members` are the parameters that are synchronized. All options of their groups must be equal, or without
    `all_options` those in `SET_BY_USERS`; and all options of the groups of `outer`, if there is one.

    Attributes
    ----------
    changes : ParameterChanges, optional
        Changes of the parameters on this rank.
    common : mapping
        The values in the model that all ranks have, of parameters that hold others now.
    evaluation : int
        How often a closure has been called in this step.
    loss : float or None
        Loss that a closure has returned, for optimizers that decide by it.
    comm : Communicator
        Communicator of the ranks that agree.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        members: Sequence[NamedParameter],
        all_options: bool,
        outer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.members = members
        self.changes: ParameterChanges | None = None
        self.common: Mapping[Tensor, Tensor] = {}
        self.evaluation = 0
        self.loss: float | None = None
        self.comm = comm
        self._compared = [_Compared(optimizer, "", all_options)]
        if outer is not None:
            self._compared.append(_Compared(outer, "outer ", True))
        self._snapshot: list[list[object]] | None = None
        self._raw: tuple[ParameterGroup, ...] | None = None
        self._can_change = False
        self._options = self._mark = self._turn = 0
        self._changed: Mapping[str, str] = {}  # the changes in words, as this step compares them
        self._sums = np.empty(5, np.int64)  # refusals, ranks that drop, ranks without gradients, marks, ranks

    def for_another_call(self) -> StepAgreement:
        """Return an agreement on the same optimizers for a call that is in flight while others are."""
        other = copy.copy(self)
        other._sums = np.empty_like(self._sums)
        return other

    @property
    def is_settled(self) -> bool:
        """Flag: the sums have come, and all ranks make the step."""
        refusals, dropping, emptied, _, ranks = self._sums.tolist()
        return bool(ranks > 1 and refusals == dropping == 0 <= emptied < ranks and self._is_equal())

    def forget_sums(self) -> None:
        """Make the sums those of no step: until `attach` has made a call carry this step's, nothing is settled."""
        self._sums[:] = -1

    def attach(self, aggregator: Aggregator, intent: StepIntent) -> None:
        """Let the next call of `aggregator` carry this rank's numbers."""
        if self.comm.size == 1:
            self.forget_sums()
            return
        self._turn = aggregator.step  # which the call compares
        _, crc = self._sample()
        loss = 0 if self.loss is None else fingerprint(repr(self.loss))
        self._changed = {} if self.changes is None or intent.is_silent else self.changes.describe()
        changed = fingerprint(str(self._changed)) if self._changed else 0
        # of integers, which Python hashes to the same value in every process
        self._mark = hash((self._options_mark(), self._evaluation, crc, loss, changed)) & _MASK
        self._sums[:] = -1  # until the ranks' sums are there
        aggregator.carry(np.array((*intent.counts, self._mark, 1), np.int64), self._sums)

    def conclude(self, intent: StepIntent) -> bool:
        """Return True if all ranks make the step, and False if all drop it.

        The call with the numbers has ended. Collective if the ranks differ.

        Raises
        ------
        Exception
            This rank's refusal.
        RuntimeError
            All ranks make the step with gradients that they have dropped.
        CollectiveMismatch
            Another rank refuses the step, only some ranks drop it, or the optimizers, their options or the models
            differ. The text names the first difference, and is the same on all ranks.
        """
        if self.comm.size == 1 and self._sums[4] < 0:  # this rank made the call alone
            self._sums[:] = (*intent.counts, self._mark, 1)
        # of the ranks that made the call, which may have been more than there are now
        refusals, dropping, n_emptied, _, ranks = self._sums.tolist()
        if refusals or dropping not in (0, ranks) or not self._is_equal():
            self._raise(intent)
        if n_emptied == ranks:
            raise marked(
                RuntimeError(
                    f"{self.comm.here}: zero_grad() between backward() and step() has dropped the gradients of this "
                    "step; call zero_grad() after step() or before backward()"
                )
            )
        return not intent.drops

    def require_same_options(self) -> None:
        """Raise CollectiveMismatch on all ranks unless their optimizers have one class and equal options."""
        mine: RankDescription = {"refusal": "", "drops": False, "compared": self.describe()}
        ranks = self.comm.allgather_object(mine)
        if any(of_rank != ranks[0] for of_rank in ranks):
            raise CollectiveMismatch(first_difference(ranks, ""))

    def describe(self) -> dict[str, object]:
        """Return the values that the ranks compare, by their names in messages."""
        found: dict[str, object] = {}
        for one in self._compared:
            found[f"the class of the {one.role}optimizer"] = type(one.optimizer).__name__
            for number, group in enumerate(one.optimizer.param_groups):
                found[f"the number of tensors in {one.role}parameter group {number}"] = len(group["params"])
                for key, value in group.items():
                    if one.compares(key):
                        found[f"{key!r} of {one.role}parameter group {number}"] = option_text(value)
        return found

    @property
    def _evaluation(self) -> int:
        # a step without a closure, as `join` makes it, is one with the first evaluation
        return self.evaluation or 1

    def _is_equal(self) -> bool:
        marks, ranks = self._sums[3:].tolist()
        return bool((marks - self._mark * ranks) & _WORD == 0)

    def _options_mark(self) -> int:
        groups = [group for one in self._compared for group in one.optimizer.param_groups]
        raw = (*({**group, "params": len(group["params"]), "param_names": ()} for group in groups),)
        with suppress(RuntimeError, ValueError):  # `==` of other tensors or arrays
            if not self._can_change and raw == self._raw:  # objects are mostly the same: 0.3 us a group
                return self._options
        self._raw, self._can_change = raw, can_change(raw)
        # sorted, since a group that was loaded from a state may have its options in another order
        snapshot = [
            [len(group["params"]), *sorted((key, plain_option(group[key])) for key in group if one.compares(key))]
            for one in self._compared
            for group in one.optimizer.param_groups
        ]
        if snapshot != self._snapshot:
            kinds = " ".join(type(one.optimizer).__name__ for one in self._compared)
            self._snapshot, self._options = snapshot, fingerprint(f"{kinds} {snapshot}")
        return self._options

    def _sample(self) -> tuple[str, int]:
        """Name of a parameter, and the checksum of some of its elements: other ones at each step."""
        on_device = self.members[0].parameter.device.type != "cpu"
        turn, place = divmod(self._turn // (DEVICE_SAMPLE_STEPS if on_device else 1), len(self.members))
        member = self.members[place]
        values = self.common.get(member.parameter, member.parameter).detach()
        if values.device.type != "cpu" and self._turn % DEVICE_SAMPLE_STEPS:
            return member.name, 0
        if values.ndim > 1:  # of another memory format on another rank, or strided, all of it would be copied
            count = max(1, SAMPLE_ELEMENTS * values.shape[0] // values.numel())  # rows
            turn, block = divmod(turn, -(-values.shape[0] // count))
            values = values[block * count : (block + 1) * count]
        start = turn % -(-values.numel() // SAMPLE_ELEMENTS) * SAMPLE_ELEMENTS
        part = values.reshape(-1)[start : start + SAMPLE_ELEMENTS]
        return member.name, zlib.crc32(tensor_bytes(part.cpu()).numpy().data)

    def _raise(self, intent: StepIntent) -> NoReturn:
        name, crc = self._sample()
        # the traceback of the refusal would keep the intent, and the intent the refusal
        refusal, intent.refusal = intent.refusal, None
        text = "" if refusal is None else one_line(refusal)
        compared = {**self._changed, **self.describe()}
        compared[PLACES] = compared.pop(PLACES, "")  # behind the options, which name the difference better
        compared |= {"loss": option_text(self.loss), "evaluation": self._evaluation, "sample": crc}
        mine: RankDescription = {"refusal": text, "drops": intent.drops, "compared": compared}
        ranks = [mine] if self.comm.size == 1 else self.comm.allgather_object(mine)
        if refusal is not None:
            try:
                raise marked(refusal)
            finally:
                refusal = None  # its traceback has this frame
        raise CollectiveMismatch(f"{first_difference(ranks, name)}. No rank has made the step")


@dataclass(frozen=True, eq=False)
class _Compared:
    """An optimizer whose class and options the ranks compare."""

    optimizer: torch.optim.Optimizer
    role: str  # in messages, with a space after it
    all_options: bool

    def compares(self, key: str) -> bool:
        """Return True if the ranks must have the same option `key`."""
        # the layout of the parameters is compared when the optimizer is wrapped
        return key not in LISTS and (self.all_options or key in SET_BY_USERS)
