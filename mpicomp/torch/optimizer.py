"""DistributedOptimizer: a torch optimizer whose ranks share one model.

Where the mean over ranks is taken decides what a residual means, so there are two modes::

    gradients   g = aggregate(grad);  grad <- g;  optimizer.step()
    updates     optimizer.step() on each rank, H times;  u = x_common - x_local;  g = aggregate(u)
                x_common <- x_common - g;  x_local <- x_common

Under "gradients" all ranks run one optimizer on one averaged gradient, as with a dense all-reduce. Under "updates"
momentum and Adam run on each rank's own gradients, before the aggregation, and their state differs between ranks: what
Marsit asks for (section 5 of its paper), with H = ``local_steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.gradients import GradientRounds
from mpicomp.torch.lanes import open_lanes
from mpicomp.torch.masters import Masters
from mpicomp.torch.replicas import require_cpu, require_same_layout, require_same_values
from mpicomp.torch.updates import UpdateRounds

_STATE_KEY = "mpicomp"


class DistributedOptimizer(torch.optim.Optimizer):
    """Wrap a torch optimizer so that ``step`` also synchronizes the ranks through a compressing all-reduce.

    Every rank builds the same model, calls :func:`broadcast_parameters` once, wraps its optimizer and trains on its own
    data. Learning-rate schedulers take the wrapper like any optimizer. Memory beyond the aggregators': two vectors of
    one bucket, and under "updates" one flat copy of the model.

    Parameters
    ----------
    optimizer
        Any torch optimizer over CPU parameters. Parameters frozen now (``requires_grad=False``) are left out for good.
    algorithm
        For instance ``mpicomp.Marsit(full_precision_every=100)``.
    comm
        Communicator; None makes one on all ranks of the job. Closing it, also as ``optimizer.comm``, is the caller's.
    named_parameters
        ``model.named_parameters()``: names for error messages.
    synchronize
        "gradients", "updates", or None for what the algorithm prefers.
    local_steps
        Optimizer steps between two synchronizations, under "updates".
    bucket_mb
        Largest bucket in MiB. A tensor larger than that has its own.

    Attributes
    ----------
    optimizer
        The wrapped optimizer.
    mode
        "gradients" or "updates".
    comm
        The communicator.
    aggregators
        One per bucket; their ``traffic`` counts what was sent.

    Raises
    ------
    ValueError
        A parameter is not a floating-point CPU tensor, nothing is to be trained, or an argument is out of range.
    CollectiveMismatch
        The ranks' parameters differ in name, shape or dtype; at the first step, in value.

    Notes
    -----
    Under "gradients" a missing gradient counts as zeros and is present afterwards, on all ranks alike. Under "updates"
    16-bit parameters are moved as float32 masters. A closure is called as the wrapped optimizer calls it; for one that
    decides by the loss, such as LBFGS, it must return the same loss on every rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        synchronize: Literal["gradients", "updates"] | None = None,
        local_steps: int = 1,
        bucket_mb: float = 25,
    ) -> None:
        mode = algorithm.synchronize if synchronize is None else synchronize
        if mode not in ("gradients", "updates"):
            raise ValueError(f'synchronize is {synchronize!r}; choose "gradients", "updates" or None')
        if local_steps < 1:
            raise ValueError(f"local_steps is {local_steps}; at least one step lies between two synchronizations")
        if local_steps > 1 and mode == "gradients":
            raise ValueError(
                f'local_steps={local_steps} needs synchronize="updates"; under "gradients" accumulate by calling '
                "backward() several times before one step()"
            )
        if bucket_mb <= 0:
            raise ValueError(f"bucket_mb is {bucket_mb}; a bucket needs a positive size")
        names = {parameter: name for name, parameter in named_parameters or ()}
        members, self._frozen = _trainable(optimizer, names)
        self.optimizer = optimizer
        self.mode = mode
        self.comm = Communicator() if comm is None else comm
        require_same_layout({member.name: member.parameter for member in members}, self.comm)
        self._model_parameters = [member.parameter for member in members]
        self._checked_values = False
        self._rounds: GradientRounds | UpdateRounds
        if mode == "gradients":
            self._rounds = GradientRounds(open_lanes(members, algorithm, self.comm, bucket_mb), self.comm)
        else:
            masters = Masters(optimizer)
            lanes = open_lanes(masters.substitute(members), algorithm, self.comm, bucket_mb)
            self._rounds = UpdateRounds(lanes, masters, local_steps)
        self.aggregators = tuple(lane.aggregator for lane in self._rounds.lanes)

    @property
    def rounds(self) -> int:
        """Synchronizations so far."""
        return self._rounds.rounds

    @property
    def in_round(self) -> bool:
        """Whether the ranks' models differ now, because local steps were made since the last synchronization."""
        return self._rounds.open

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state by parameter."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's default options."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        # Optimizer.__init__ is not run on the wrapper: hooks and the like live in the wrapped optimizer only.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r}, {self.mode}, ranks={self.comm.size})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: buckets and residuals are laid out once. Add the group to the optimizer before wrapping it."""
        raise NotImplementedError("add the parameter group to the optimizer before wrapping it in DistributedOptimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, 16-bit ones included."""
        self.optimizer.zero_grad(set_to_none)
        self._rounds.drop_gradients(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step, and a synchronization if one is due.

        Parameters
        ----------
        closure
            Reevaluates the model and returns the loss, as for the wrapped optimizer.

        Returns
        -------
        float or None
            What the wrapped optimizer returns: the loss of `closure` on this rank.

        Raises
        ------
        ValueError
            A gradient is sparse, or a frozen parameter was unfrozen; names the parameter.
        NonFiniteGradient
            A rank has NaN or infinity; names the ranks, and this rank's parameters.
        CollectiveError
            The ranks disagree or one of them does not answer.
        """
        self._check_before_step()
        if closure is None:
            self._rounds.before_step()
            loss = self.optimizer.step()
        else:

            def evaluate() -> float:
                value = closure()
                self._rounds.before_step()
                return value

            loss = self.optimizer.step(evaluate)
        self._rounds.after_step()
        return loss

    def synchronize(self) -> None:
        """Close the round now, even if fewer than `local_steps` steps were made; nothing to do if none were.

        With ``local_steps > 1`` the ranks' models differ between rounds: call this before evaluating or saving.
        """
        self._rounds.close()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state plus this rank's residuals and counters, under the key "mpicomp".

        Every rank has its own. Within a round (``local_steps > 1``) it holds the common model too.
        """
        own = {
            "mode": self.mode,
            "rounds": self._rounds.state_dict(),
            "aggregators": [aggregator.state_dict() for aggregator in self.aggregators],
        }
        return {**self.optimizer.state_dict(), _STATE_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the same rank of as many ranks; load the model before or after.

        Raises
        ------
        ValueError
            The state was not made by a DistributedOptimizer of this mode and these buckets.
        """
        own = state_dict.get(_STATE_KEY)
        if own is None:
            raise ValueError(
                "this is a plain optimizer's state, without residuals; load it into .optimizer, the wrapped optimizer"
            )
        if own["mode"] != self.mode or len(own["aggregators"]) != len(self.aggregators):
            raise ValueError(
                f"the state is for synchronize={own['mode']!r} and {len(own['aggregators'])} buckets, but this one "
                f"has {self.mode!r} and {len(self.aggregators)}; build it with the same options"
            )
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != _STATE_KEY})
        for aggregator, state in zip(self.aggregators, own["aggregators"], strict=True):
            aggregator.load_state_dict(state)
        self._rounds.load_state_dict(own["rounds"])
        # Between two rounds the ranks' models rightly differ.
        self._checked_values = self.in_round

    def _check_before_step(self) -> None:
        for member in self._frozen:
            if member.parameter.requires_grad:
                self.comm.refuse(
                    ValueError(
                        f"rank {self.comm.rank} of {self.comm.size}: parameter {member.name!r} was frozen when the "
                        "optimizer was wrapped, so nothing synchronizes it; unfreeze it before wrapping"
                    ),
                    "an optimizer step",
                )
        if not self._checked_values:
            require_same_values(self._model_parameters, self.comm)
            self._checked_values = True


def _trainable(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str]
) -> tuple[list[NamedParameter], list[NamedParameter]]:
    """The optimizer's parameters that can be trained, and those that are frozen, in its order."""
    trainable: list[NamedParameter] = []
    frozen: list[NamedParameter] = []
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"group {g}, parameter {i}")
            require_cpu(name, parameter)
            if not parameter.is_floating_point() or parameter.layout != torch.strided:
                raise ValueError(
                    f"parameter {name!r} is a {parameter.layout} tensor of {parameter.dtype}; leave it out of the "
                    "optimizer, since only dense float16, bfloat16, float32 and float64 can be synchronized"
                )
            if parameter.numel():
                (trainable if parameter.requires_grad else frozen).append(NamedParameter(name, parameter))
    if not trainable:
        raise ValueError("the optimizer holds no parameter that requires a gradient; nothing is left to synchronize")
    return trainable, frozen
