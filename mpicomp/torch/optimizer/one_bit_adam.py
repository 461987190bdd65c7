"""OneBitAdam: Adam whose ranks exchange their momenta in one bit per element, or a few.

    steps 1 .. T   Adam on the dense mean of the gradients; then v is frozen, with its bias correction, as w
    later          m_rank = b1 m + (1 - b1) g_rank
                   m <- DoubleSqueeze(w m_rank) / w                 the same on all ranks
                   x <- x - lr (m / (1 - b1^t)) w,                  w = 1 / (sqrt(v / (1 - b2^T)) + eps)

Adam's v is not linear in the gradients, so an error that compression made in one step cannot be made up for in a later
one. Once v is a constant, Adam is momentum SGD with fixed factors, and error feedback works.

Departures from the paper: the ranks exchange w m_rank where the paper has m_rank (``preconditioned=False``), and one
bit is scaled by the mean magnitude where the paper keeps the length. An element's compressed momentum has the magnitude
of its neighbours', and where its v is much smaller than theirs the step becomes many times too long. w m_rank has
nearly one magnitude everywhere.

Reference: Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam: communication efficient large-scale
training with Adam's convergence speed", ICML 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from collectives import Communicator
from collectives.compiling import keep_uncompiled
from collectives.consistency.call_check import fingerprint
from collectives.quoting import one_line, shown
from mpicomp.algorithms import Aggregator, Algorithm, Dense, DoubleSqueeze
from mpicomp.torch.bucket_reducers import BucketReducer, BucketReducers
from mpicomp.torch.front_ends import NonCopyable, algorithms_by_name, given_communicator, names_by_parameter
from mpicomp.torch.optimizer.adam_moments import AdamMoments, check_group
from mpicomp.torch.optimizer.step_agreement import StepAgreement, StepIntent
from mpicomp.torch.optimizer.variance_freeze import VarianceFreeze
from mpicomp.torch.parameters import MasterWeights, Parameters
from mpicomp.torch.replication import require_alike, require_same_values
from mpicomp.torch.state.schema import (
    STATE_KEY,
    load_aggregators,
    own_part,
    rank_part,
    require_aggregators,
    require_counters,
    require_like,
    require_rank,
)

_MOST_BUCKET = 4096


class OneBitAdam(NonCopyable, torch.optim.Optimizer):
    """Adam that synchronizes the ranks by compressed momenta; not to be wrapped in `DistributedOptimizer`.

    Every rank builds the same model, calls :func:`broadcast_parameters` once, makes this optimizer and trains on its
    own data. ``step`` communicates. Parameter groups may differ in all of Adam's options; learning-rate schedulers take
    it like any optimizer. Memory: three vectors of the model's length and, once v is frozen, DoubleSqueeze's residuals.

    Parameters
    ----------
    params
        Parameters, named parameters or groups, as of any torch optimizer, on the CPU or a GPU. Those frozen now
        (``requires_grad=False``) are left out for good.
    lr, betas, eps, weight_decay
        As of ``torch.optim.Adam``.
    decoupled_weight_decay
        True: weight decay as of AdamW; False: as an L2 penalty.
    bits
        1 to 8, of each element that is exchanged once v is frozen: signs with a scale, or 2^bits - 1 random levels.
    warmup_steps
        Steps of dense Adam before v is frozen, or "auto": until v is stable (`variance_freeze.py`), which takes more
        than 1 / (1 - beta2) steps from the end of the learning rate's warm-up.
    compressor
        A codec of `mpicomp.codecs` or its name, in place of the one that `bits` means.
    preconditioned
        Whether momenta are exchanged with the factor w; False: without, as in the paper.
    comm
        Communicator; None makes one on all ranks of the job. Closing it, also as ``optimizer.comm``, is the caller's.
    named_parameters
        ``model.named_parameters()``: names for error messages.
    bucket_mb
        Largest bucket in MiB. A tensor larger than that has its own.
    seed
        Of random levels; equal on all ranks. Two optimizers on one communicator need different ones.

    Attributes
    ----------
    comm
        The communicator.
    steps
        Steps so far.
    frozen
        Whether v is frozen.
    algorithm
        How momenta are exchanged.

    Raises
    ------
    ValueError, TypeError
        An option is out of range, a parameter is not a floating-point tensor on the CPU or a GPU, or nothing is to be
        trained; the other ranks then raise CollectiveMismatch.
    CollectiveMismatch
        The ranks' options differ, or their parameters in name, shape or dtype; at a step, in value.

    Notes
    -----
    A missing gradient counts as zeros. 16-bit parameters are moved as float32 masters. `eps` and beta2 have no effect
    once v is frozen. Elements whose gradients were all zero before that never move afterwards, but for decoupled weight
    decay; ``masked`` counts them.

    The moments are in ``state_dict()``; ``state`` stays empty.
    """

    synchronizes_ranks: ClassVar[bool] = True
    mode: ClassVar[str] = "momenta"
    models_differ: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        decoupled_weight_decay: bool = False,
        bits: int = 1,
        warmup_steps: int | Literal["auto"] = "auto",
        compressor: Any = None,
        preconditioned: bool = True,
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ) -> None:
        self.comm = given_communicator(comm, "OneBitAdam")
        self.steps, self.frozen = 0, False
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        try:
            self._freeze_rule = VarianceFreeze(warmup_steps)
            self.algorithm: Algorithm = DoubleSqueeze(_by_bits(bits) if compressor is None else compressor, seed)
            if not bucket_mb > 0:
                raise ValueError(f"bucket_mb is {bucket_mb}; a bucket needs a positive size")
            super().__init__(params, defaults)
            for group in self.param_groups:
                check_group(group)
            self._parameters = Parameters(self, names_by_parameter(named_parameters), self.comm.here)
        except (ValueError, TypeError) as error:
            self._reject(error, "making OneBitAdam")
        self._options = (
            f"OneBitAdam(algorithm={self.algorithm}, warmup_steps={warmup_steps}, preconditioned={preconditioned}, "
            f"bucket_mb={bucket_mb:g})"
        )
        self.comm.agree(fingerprint(self._options), lambda: self._options)
        require_alike(self._parameters.trained, self.comm)
        self._checked_values = False
        self._agreement = StepAgreement(self, self.comm, self._parameters.trained, all_options=True)
        self._agreement.require_same_options()
        self._masters = MasterWeights(self)
        self._parameters.hold(self)
        members = self._masters.substitute(self._parameters.trained)
        self._dense, self._squeezed = (
            BucketReducers(members, algorithms_by_name(one, members), self.comm, bucket_mb, one_by_one=True)
            for one in (Dense(), self.algorithm)
        )
        for reducers in (self._dense, self._squeezed):
            reducers.lay_out(range(len(members)))
        group_of = {one: number for number, group in enumerate(self.param_groups) for one in group["params"]}
        self._moments = [AdamMoments(reducer.bucket, group_of, preconditioned) for reducer in self._squeezed]

    @property
    def reducers(self) -> Sequence[BucketReducer]:
        """What the last step exchanged its vectors by, one per bucket."""
        return self._squeezed if self.frozen else self._dense

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """Those of the last step, one per bucket; their ``traffic`` counts what was sent."""
        return tuple(reducer.aggregator for reducer in self.reducers)

    @property
    def synchronizations(self) -> int:
        """Steps so far: each one synchronizes."""
        return self.steps

    @property
    def masked(self) -> int:
        """Elements that never move because v was 0 there when it was frozen."""
        return sum(moments.masked.numel() for moments in self._moments)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refused: a GradScaler would skip a step on the one rank that finds infinities in its gradients."""
        raise RuntimeError(f"{self.comm.here}: OneBitAdam takes no GradScaler; use bfloat16, which needs none")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made, since buckets and residuals are laid out once."""
        if hasattr(self, "_moments"):
            raise NotImplementedError("give OneBitAdam all parameter groups when you make it")
        super().add_param_group(param_group)

    @keep_uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, 16-bit ones included."""
        super().zero_grad(set_to_none)
        self._masters.drop_gradients(set_to_none)

    @keep_uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, the same on all ranks.

        A step that raises leaves parameters, moments and residuals as they were.

        Parameters
        ----------
        closure
            Reevaluates the model and returns the loss; called once.

        Returns
        -------
        float or None
            The loss of `closure` on this rank.

        Raises
        ------
        ValueError
            A gradient is sparse, a parameter was frozen or unfrozen, or a group's option is out of range.
        NonFiniteGradient
            A rank has NaN or infinity; names the ranks, and this rank's parameters.
        CollectiveMismatch
            The ranks do not make the same call, or their groups' options differ.
        CollectiveError
            A rank does not answer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_before_step()
        self._masters.refresh()
        self._masters.take_gradients()
        groups = self.param_groups
        if not self.frozen and self._freeze_rule.due(self.steps, groups):
            for moments in self._moments:
                moments.freeze(groups, self.steps)
            self.frozen = True
        self._exchange()
        self.steps += 1
        for moments in self._moments:
            if self.frozen:
                moments.move_frozen(groups, self.steps)
            else:
                moments.move(groups, self.steps)
        self._masters.publish()
        if not self.frozen and self._freeze_rule.watches:
            self._freeze_rule.note(sum(moments.norm(groups, self.steps) for moments in self._moments), groups)
        return loss

    def _exchange(self) -> None:
        """Fill the moments' `result`, of all buckets or of none."""
        done: list[BucketReducer] = []
        try:
            for moments, reducer in zip(self._moments, self.reducers, strict=True):
                moments.own_gradients(reducer)
                if self.frozen:
                    moments.own_momentum(reducer, self.param_groups)
                if not done:
                    self._agreement.attach(reducer.aggregator, StepIntent())
                reducer.aggregate()
                done.append(reducer)
                if len(done) == 1:
                    self._agreement.conclude(StepIntent())
                moments.result.copy_(reducer.mean)
        except BaseException:
            for reducer in done:
                reducer.aggregator.undo()
            raise

    @keep_uncompiled
    def state_dict(self) -> dict[str, Any]:
        """The groups' options, and under the key "mpicomp" this rank's copy of moments, residuals and counters.

        Every rank has a state of its own, of tensors, numbers and texts.
        """
        own = {
            "options": self._options,
            "steps": self.steps,
            "frozen": self.frozen,
            **{key: {name: one.clone() for name, one in found.items()} for key, found in self._named().items()},
            "freeze_rule": self._freeze_rule.state_dict(),
            **rank_part(self.comm, self.aggregators),
        }
        return {**super().state_dict(), STATE_KEY: own}

    @keep_uncompiled
    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Look at a state that is not to be loaded yet; not collective.

        Raises
        ------
        ValueError
            As `load_state_dict` would on this rank.
        """
        self._own_state(state_dict)

    @keep_uncompiled
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the same rank of as many ranks; collective.

        Load the model before or after.

        Raises
        ------
        ValueError
            The state was made on another rank or number of ranks, with other options or for other parameters, or it is
            damaged. Nothing is changed then, on any rank; the other ranks raise CollectiveMismatch.
        CollectiveMismatch
            Another rank raised ValueError, or the ranks' states are of different steps.
        """
        before = super().state_dict()
        try:
            own = self._own_state(state_dict)
            self._load_groups({"state": {}, "param_groups": state_dict.get("param_groups")}, before)
        except ValueError as error:
            self._reject(error, "restoring an optimizer")
        when = f"restoring OneBitAdam after {own['steps']} steps, with v {'frozen' if own['frozen'] else 'in motion'}"
        try:
            self.comm.agree(fingerprint(when), lambda: when)
        except BaseException:
            super().load_state_dict(before)
            raise
        self.steps, self.frozen = own["steps"], own["frozen"]
        self._freeze_rule.load_state_dict(own["freeze_rule"])
        for key, tensors in self._named().items():
            for name, one in tensors.items():
                one.copy_(own[key][name])
        if self.frozen:
            for moments in self._moments:
                moments.find_masked()
        load_aggregators(own, self.aggregators)
        self._checked_values = False

    def _own_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return our part of a state; raise ValueError unless all of it can be loaded."""
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get(STATE_KEY), dict):
            raise ValueError(f"the state is {shown(state_dict)}, not one of OneBitAdam; load what state_dict returned")
        own = own_part(state_dict, options=str, frozen=bool, freeze_rule=dict)
        require_counters(own, "steps")
        self._freeze_rule.check_state_dict(own["freeze_rule"])
        require_rank(own, self.comm)
        if own["options"] != self._options:
            raise ValueError(
                f"the state is of {shown(own['options'])}, and this is {self._options}; use the same options"
            )
        for key, tensors in self._named().items():
            require_like(own, key, tensors)
        reducers = self._squeezed if own["frozen"] else self._dense
        require_aggregators(own, [reducer.aggregator for reducer in reducers])
        return own

    def _named(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a state, by the parameters' names; no copies."""
        found: dict[str, dict[str, Tensor]] = {"m": {}, "v": {}, "masters": {}}
        for moments in self._moments:
            m, v = moments.named()
            found["m"] |= m
            found["v"] |= v
        masters = set(self._masters.masters)
        members = (member for reducer in self._squeezed for member in reducer.bucket.members)
        found["masters"] = {one.name: one.parameter.detach() for one in members if one.parameter in masters}
        return found

    def _load_groups(self, state: dict[str, Any], before: dict[str, Any]) -> None:
        """Load the groups' options, or leave them as they were and raise ValueError."""
        try:
            super().load_state_dict(state)
            for group in self.param_groups:
                check_group(group)
        except Exception as error:  # torch checks little
            super().load_state_dict(before)
            raise ValueError(
                f"the state's parameter groups cannot be taken ({type(error).__name__}: {one_line(error)}); make the "
                "optimizer with the same groups, or load an earlier state"
            ) from error

    def _check_before_step(self) -> None:
        """Refuse changes that would make the ranks' models differ; without communication if there are none."""
        problem = self._parameters.find_change(self)
        if problem is not None:
            self.comm.reject(problem, "a step of OneBitAdam")
        try:
            for group in self.param_groups:
                check_group(group)
            for member in self._parameters.trained:
                gradient = member.parameter.grad
                if gradient is not None and gradient.layout != torch.strided:
                    raise ValueError(
                        f"the gradient of {member.name!r} is sparse, which OneBitAdam does not take; build its layer "
                        "with sparse=False"
                    )
        except ValueError as error:
            self._reject(error, "a step of OneBitAdam")
        if not self._checked_values:
            require_same_values({one.name: one.parameter for one in self._parameters.trained}, self.comm)
            self._checked_values = True

    def _reject(self, error: Exception, call: str) -> NoReturn:
        self.comm.reject(type(error)(f"{self.comm.here}: {error}"), call)


def _by_bits(bits: int) -> str:
    """The compressor that sends so many bits an element, with groups short enough for error feedback to be sound."""
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}; choose a whole number from 1 to 8")
    if bits == 1:
        return "one-bit:bucket=32768,scale=l1"
    if bits == 2:
        return "ternary:bucket=32"
    levels = 2 ** (bits - 1) - 1
    return f"quantize:levels={levels},bucket={min(_MOST_BUCKET, 8 * levels**2 // 64 * 64)}"
