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
from collectives.consistency.call_check import fingerprint
from collectives.json_file import fields, one_line, shown
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets import open_bucket_reducers
from mpicomp.torch.gradient_averaging import GradientAveraging
from mpicomp.torch.local_updates import LocalUpdates
from mpicomp.torch.master_weights import MasterWeights
from mpicomp.torch.parameters import Parameters
from mpicomp.torch.replication import require_same_layout, require_same_values
from mpicomp.torch.states import with_arrays, with_tensors

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
        A parameter is not a floating-point CPU tensor, nothing is to be trained, or an argument is out of range; the
        other ranks then raise CollectiveMismatch.
    CollectiveMismatch
        The ranks' options differ, or their parameters in name, shape or dtype; at the first step, in value.

    Notes
    -----
    Under "gradients" a missing gradient counts as zeros and is present afterwards, on all ranks alike. Under "updates"
    16-bit parameters are moved as float32 masters.

    A closure is called as the wrapped optimizer calls it. Under "gradients" each call averages, so for one that decides
    by the loss, such as LBFGS, it must return the same loss on every rank.

    With an algorithm of ``nonfinite="skip"`` under "updates", no rank makes a step for which one of them has NaN or
    infinity in its gradients (a closure's first ones): all gradients are then set to None, and the step does not count.

    Two optimizers on one communicator need algorithms with different seeds: both number their buckets from 0, and
    would draw the same random numbers.
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
        self.optimizer = optimizer
        self.mode = mode = algorithm.synchronize if synchronize is None else synchronize
        self.comm = Communicator() if comm is None else comm
        try:
            _check_options(mode, local_steps, bucket_mb)
            self._parameters = Parameters(optimizer, {parameter: name for name, parameter in named_parameters or ()})
        except ValueError as error:
            here = f"rank {self.comm.rank} of {self.comm.size}: {error}"
            self.comm.reject(ValueError(here), "wrapping an optimizer")
        options = f"DistributedOptimizer(synchronize={mode!r}, local_steps={local_steps}, bucket_mb={bucket_mb:g})"
        self.comm.agree(fingerprint(options), lambda: options)
        members = self._parameters.trained
        require_same_layout({member.name: member.parameter for member in members}, self.comm)
        self._checked_values = False
        self._synchronizer: GradientAveraging | LocalUpdates
        if mode == "gradients":
            self._synchronizer = GradientAveraging(
                open_bucket_reducers(members, algorithm, self.comm, bucket_mb), self.comm
            )
        else:
            masters = MasterWeights(optimizer)
            reducers = open_bucket_reducers(masters.substitute(members), algorithm, self.comm, bucket_mb)
            skip_nonfinite = getattr(algorithm, "nonfinite", None) == "skip"
            self._synchronizer = LocalUpdates(reducers, self.comm, masters, local_steps, skip_nonfinite)
        self.aggregators = tuple(reducer.aggregator for reducer in self._synchronizer.reducers)

    @property
    def synchronizations(self) -> int:
        """Synchronizations so far."""
        return self._synchronizer.synchronizations

    @property
    def models_differ(self) -> bool:
        """Whether the ranks' models differ now, because local steps were made since the last synchronization."""
        return self._synchronizer.models_differ

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
        self._synchronizer.drop_gradients(set_to_none)

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
            A gradient is sparse, or a parameter was frozen or unfrozen since wrapping; names the parameter.
        NonFiniteGradient
            A rank has NaN or infinity; names the ranks, and this rank's parameters. The ranks' models are equal.
        CollectiveMismatch
            The ranks do not make the same call. If this step was to synchronize, the model is now the common one.
        CollectiveError
            A rank does not answer.
        """
        self._check_before_step()
        self._synchronizer.begin_step()
        if closure is None:
            self._synchronizer.take_gradients()
            loss = self.optimizer.step()
        else:

            def evaluate() -> float:
                self._synchronizer.before_evaluation()
                value = closure()
                self._synchronizer.take_gradients()
                return value

            loss = self.optimizer.step(evaluate)
        self._synchronizer.end_step()
        return loss

    def synchronize(self) -> None:
        """Do now what the mode averages.

        Under "updates": average the moves of the steps since the last synchronization, fewer than `local_steps`.
        With ``local_steps > 1`` the ranks' models differ between synchronizations: call this before evaluating or
        saving.

        Under "gradients": average the gradients, for instance to clip the norm of their mean. The following `step` then
        takes them as they are, unless :meth:`zero_grad` or a closure comes before.
        """
        if self.mode == "gradients":
            self._check_before_step()
        self._synchronizer.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state plus this rank's residuals and counters, under the key "mpicomp".

        Every rank has a state of its own, of tensors and numbers. After local steps it holds the common model too.
        """
        own = {
            "mode": self.mode,
            "rounds": self._synchronizer.state_dict(),
            "aggregators": [with_tensors(aggregator.state_dict()) for aggregator in self.aggregators],
        }
        return {**self.optimizer.state_dict(), _STATE_KEY: own}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Look at a state that is not to be loaded yet; not collective.

        Raises
        ------
        ValueError
            As `load_state_dict` would on this rank.
        """
        self._own_state(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the same rank of as many ranks; collective.

        Load the model before or after.

        Raises
        ------
        ValueError
            The state was not made by a DistributedOptimizer of this mode, method and these buckets, or it is damaged.
            Nothing is changed then, on any rank; the other ranks raise CollectiveMismatch.
        CollectiveMismatch
            Another rank raised ValueError, or the ranks' states are of different synchronizations.
        """
        before = self.optimizer.state_dict()
        try:
            own = self._own_state(state_dict)
            self._load_wrapped({key: value for key, value in state_dict.items() if key != _STATE_KEY}, before)
        except ValueError as error:
            here = f"rank {self.comm.rank} of {self.comm.size}: {error}"
            self.comm.reject(ValueError(here), "restoring an optimizer")
        when = f"restoring an optimizer after {own['rounds']['rounds']} synchronizations"
        try:
            self.comm.agree(fingerprint(when), lambda: when)
        except BaseException:
            self.optimizer.load_state_dict(before)
            raise
        for aggregator, state in zip(self.aggregators, own["aggregators"], strict=True):
            aggregator.load_state_dict(with_arrays(state))
        self._synchronizer.load_state_dict(own["rounds"])
        # Between two synchronizations the ranks' models rightly differ.
        self._checked_values = self.models_differ

    def _own_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return our part of a state; raise ValueError unless all of it can be loaded."""
        if not isinstance(state_dict, dict):
            raise ValueError(f"the state is {shown(state_dict)}, not a dict; load what state_dict returned")
        if state_dict.get(_STATE_KEY) is None:
            raise ValueError(
                "this is a plain optimizer's state, without residuals; load it into .optimizer, the wrapped optimizer"
            )
        try:
            own = fields(state_dict[_STATE_KEY], mode=str, rounds=dict, aggregators=list)
        except ValueError as error:
            raise ValueError(f"the state under {_STATE_KEY!r} is damaged ({error}); load an earlier one") from error
        if own["mode"] != self.mode or len(own["aggregators"]) != len(self.aggregators):
            raise ValueError(
                f"the state is for synchronize={shown(own['mode'])} and {len(own['aggregators'])} buckets, but this "
                f"one has {self.mode!r} and {len(self.aggregators)}; build it with the same options"
            )
        for aggregator, state in zip(self.aggregators, own["aggregators"], strict=True):
            aggregator.check_state_dict(with_arrays(state))
        self._synchronizer.check_state_dict(own["rounds"])
        return own

    def _load_wrapped(self, state: dict[str, Any], before: dict[str, Any]) -> None:
        """Load the wrapped optimizer's own state, or leave it as it was and raise ValueError."""
        try:
            self.optimizer.load_state_dict(state)
        except Exception as error:  # torch checks little, and other optimizers have rules of their own
            self.optimizer.load_state_dict(before)
            raise ValueError(
                f"{type(self.optimizer).__name__} cannot load its part of the state ({type(error).__name__}: "
                f"{one_line(error)}); build it with the same options, or load an earlier state"
            ) from error

    def _check_before_step(self) -> None:
        self._parameters.require_unchanged(self.comm)
        if not self._checked_values:
            require_same_values((member.parameter for member in self._parameters.trained), self.comm)
            self._checked_values = True


def _check_options(mode: str, local_steps: int, bucket_mb: float) -> None:
    if mode not in ("gradients", "updates"):
        raise ValueError(f'synchronize is {mode!r}; choose "gradients", "updates" or None')
    if local_steps < 1:
        raise ValueError(f"local_steps is {local_steps}; at least one step lies between two synchronizations")
    if local_steps > 1 and mode == "gradients":
        raise ValueError(
            f'local_steps={local_steps} needs synchronize="updates"; under "gradients" accumulate by calling '
            "backward() several times before one step()"
        )
    if bucket_mb <= 0:
        raise ValueError(f"bucket_mb is {bucket_mb}; a bucket needs a positive size")
