"""DistributedOptimizer: a torch optimizer whose ranks share one model.

The point at which the mean over ranks is taken gives a residual its meaning, so there are two modes::

    gradients   g = aggregate(grad);  grad <- g;  optimizer.step()
    updates     optimizer.step() on each rank, H times;  u = x_common - x_local;  g = aggregate(u)
                x_common <- x_common - g, or an outer optimizer's step with the gradient g;  x_local <- x_common

Under "gradients" all ranks run one optimizer on one averaged gradient, as with a dense all-reduce. Under "updates"
momentum and Adam run on each rank's own gradients, before the aggregation, and their state differs between ranks.
Marsit is designed for that (section 5 of its paper), with H = ``local_steps``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from collectives import Communicator
from collectives.quoting import shown
from mpicomp.algorithms import Algorithm
from mpicomp.algorithms.per_island import Islands
from mpicomp.torch.bucket_queue import overlap_by_thread
from mpicomp.torch.bucket_reducers import BucketReducers
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.front_ends import (
    AlgorithmChoice,
    Options,
    algorithms_by_name,
    explain_missing_algorithm,
    given_communicator,
    names_by_parameter,
    preferred_mode,
    require_optimizer,
    skips_nonfinite,
    warn_of_ddp,
)
from mpicomp.torch.optimizer.adam_moments import ParameterGroup
from mpicomp.torch.optimizer.fragments import Blend, FragmentPlan, Fragments, deal_fragments
from mpicomp.torch.optimizer.gradient_averaging import GradientAveraging
from mpicomp.torch.optimizer.inner_steps import InnerSteps
from mpicomp.torch.optimizer.islands import IslandGradients, between_islands, require_islands
from mpicomp.torch.optimizer.local_updates import LocalUpdates
from mpicomp.torch.optimizer.outer_step import Outer, OuterStep, outer_optimizer, outer_text
from mpicomp.torch.optimizer.parameter_changes import AlgorithmsOf, ParameterChanges
from mpicomp.torch.optimizer.step_agreement import open_agreement
from mpicomp.torch.optimizer.synchronizer import Phase, Synchronizer, SynchronizerParts
from mpicomp.torch.optimizer.synchronizing_optimizer import SynchronizingOptimizer, refuse_distributed_checkpoint
from mpicomp.torch.parameters import MasterWeights, Parameters

Batch = TypeVar("Batch")

_UNSCALES = "_unscale_grads_"
"""The function of GradScaler that reads the parameter groups only to look for infinities in the gradients."""
_MOST_FRAMES = 5
"""Frames between a property of the optimizer and its caller, at most."""


class DistributedOptimizer(SynchronizingOptimizer[Synchronizer]):
    """Wrap a torch optimizer so that ``step`` also synchronizes the ranks through a compressing all-reduce.

    Every rank builds the same model, calls :func:`broadcast_parameters` once, wraps its optimizer and trains on its own
    data. Learning-rate schedulers take the wrapper like any optimizer. Memory beyond the aggregators': with overlap two
    flat copies of the model, without two vectors of one bucket; under "updates" another flat copy of the model.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any torch optimizer over parameters on the CPU or on GPUs, where they are encoded if the algorithm can do it.
        Frozen ones (``requires_grad=False``) are left out until they are unfrozen.
    algorithm : Algorithm, dict of Algorithm, or callable
        For instance ``mpicomp.Marsit(full_precision_every=100)``. Or several: by patterns of parameters' names, of
        which the first that fits counts, as in ``{"*.bias": Dense(), "*": Marsit(100)}``; or a function of name and
        parameter that returns one.
    comm : Communicator, optional
        None makes one on all ranks of the job. Closing it, also as ``optimizer.comm``, is the caller's.
    named_parameters : iterable of (str, Tensor), optional
        ``model.named_parameters()``: names for error messages, states and choices of algorithms.
    synchronize : "gradients" or "updates", optional
        None: the mode that the algorithm prefers.
    local_steps : int
        Optimizer steps between two synchronizations, under "updates".
    bucket_mb : float
        Largest bucket in MiB. A tensor larger than that has its own. A model of less than 8 times as much has 8 buckets
        if these are then no smaller than 1 MiB.
    overlap : bool, optional
        Communicate while backward runs: under "gradients" (True is the default there) each bucket's gradients are
        averaged as soon as backward has brought the last of them; under "updates" (default: False) the optimizer moves
        each bucket's parameters as soon as backward has brought their gradients, and the moves are averaged. A thread
        of the process then makes all calls of `comm`; where MPI has no MPI_THREAD_MULTIPLE, hooks in backward do.
    backward_passes_per_step : int
        How often ``backward()`` is called between two steps. The gradients of all are added up.
    outer : (float, float), torch.optim.Optimizer, or callable, optional
        Under "updates", the optimizer that moves the common model by the ranks' aggregated update, which it takes as
        its gradient. ``(eta, mu)`` is a step size and a Nesterov momentum; a function of parameters returns any other
        torch optimizer, as ``partial(torch.optim.SGD, lr=0.7, momentum=0.9)`` does. None subtracts the update, like
        ``(1, 0)``.
    fragments : int
        Under "updates", the number of sets of layers that take turns: each is averaged every `local_steps` steps, in
        another step than the others, which divides the peak of the traffic.
    delay : int
        Under "updates", local steps from the one after which a fragment is sent to the one after which the mean is
        applied, less than `local_steps`. It is sent while they go on. 0: the mean is waited for.
    blend : float or "steps"
        Under "updates", the share of a rank's own values that it keeps when a mean is applied, from 0, which replaces
        them by the common model, up to, not including, 1. "steps" adds the steps of the delay to the common model.
    islands : Communicator, optional
        Under "updates", the communicator of this rank's island, a part of `comm` that fast links join, such as
        ``comm.nodes.local``. Gradients are averaged within the island at every step, and the algorithm runs between
        islands, whose ranks each carry a share of the vector. Closing it is the caller's.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
        The wrapped optimizer.
    mode : "gradients" or "updates"
        The mode in use.
    comm : Communicator
        The communicator.
    aggregators : tuple of Aggregator
        One per bucket; their ``traffic`` counts bytes and messages. None before the first synchronization, which lays
        out the buckets in the order in which gradients came.
    buckets : list of lists of str
        The names of each bucket's parameters.
    outer : torch.optim.Optimizer or None
        The outer optimizer, whose groups learning-rate schedulers take.

    Raises
    ------
    ValueError
        A parameter is not a floating-point tensor on the CPU or a GPU, nothing is to be trained, or an argument is out
        of range; the other ranks then raise CollectiveMismatch.
    TypeError
        The optimizer is wrapped already, or an argument is something else; the others then raise CollectiveMismatch.
    CollectiveMismatch
        The ranks' options differ, or their parameters in name, shape or dtype; at the first step, in value.

    Notes
    -----
    Under "gradients" a missing gradient counts as zeros and is present afterwards, on all ranks. Under "updates"
    16-bit parameters are moved as float32 masters.

    Parameters may be added (:meth:`add_param_group`), unfrozen and frozen (``requires_grad_``) on all ranks before the
    same step. New ones join at that step, under "updates" at the next synchronization, with buckets and step counts of
    their own; frozen ones do not move.

    A closure is called as the wrapped optimizer calls it. Under "gradients" each call averages, so for one that decides
    by the loss, such as LBFGS, it must return the same loss on every rank.

    With an algorithm of ``nonfinite="skip"`` under "updates", no rank makes a step for which one of them has NaN or
    infinity in its gradients (a closure's first ones): all gradients are then set to None, and the step does not count.

    With overlap, gradients are sent during backward. To clip or change their mean, call :meth:`synchronize` first:
    earlier changes are an error. To accumulate gradients, call all but the last ``backward()`` under
    :meth:`no_sync`, or pass `backward_passes_per_step`. A ``torch.amp.GradScaler`` takes the wrapper as it takes any
    optimizer; where one rank finds infinities, all skip the step and lower their scales. Under "updates" with overlap
    parameters move during backward, so that neither clipping nor a GradScaler is possible, nor are closures and
    16-bit parameters.

    Two optimizers on one communicator need algorithms with different seeds: both number their buckets from 0, and
    would draw the same random numbers.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import DistributedOptimizer, broadcast_parameters, require_same
    >>> def train(comm):
    ...     model = torch.nn.Linear(3, 1)
    ...     broadcast_parameters(model, comm)
    ...     sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    ...     optimizer = DistributedOptimizer(sgd, mpicomp.Marsit(), comm, model.named_parameters())
    ...     for step in range(3):
    ...         inputs = torch.full((8, 3), comm.rank + 1.0)  # this rank's data
    ...         optimizer.zero_grad()
    ...         model(inputs).square().mean().backward()
    ...         optimizer.step()
    ...     require_same(model, comm)
    ...     assert optimizer.param_groups is sgd.param_groups and not optimizer.models_differ
    ...     steps = [aggregator.step for aggregator in optimizer.aggregators]
    ...     return optimizer.mode, optimizer.synchronizations, steps, sorted(optimizer.buckets[0])
    >>> mpicomp.run_local(2, train)[0]
    ('updates', 3, [3], ['bias', 'weight'])
    """

    @explain_missing_algorithm
    @in_own_mode
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: AlgorithmChoice,
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        synchronize: Literal["gradients", "updates"] | None = None,
        local_steps: int = 1,
        bucket_mb: float = 25,
        overlap: bool | None = None,
        backward_passes_per_step: int = 1,
        outer: Outer | None = None,
        fragments: int = 1,
        delay: int = 0,
        blend: Blend = 0.0,
        islands: Communicator | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.comm = given_communicator(comm, "DistributedOptimizer", optimizer, algorithm)
        with self.comm.refusing("wrapping an optimizer", ValueError, TypeError, where=self.comm.here):
            require_optimizer(optimizer, algorithm)
            if isinstance(optimizer, DistributedOptimizer):
                raise TypeError("the optimizer is a DistributedOptimizer already; wrap a plain one, once")
            if getattr(optimizer, "synchronizes_ranks", False):
                raise TypeError(f"{type(optimizer).__name__} synchronizes the ranks itself; use it as it is")
            parameters = Parameters(optimizer, names_by_parameter(named_parameters))
            members = parameters.trained
            algorithms = algorithms_by_name(algorithm, members, of_gradients=False)
            self.mode = preferred_mode(algorithms) if synchronize is None else synchronize
            of_gradients = self.mode == "gradients"
            if of_gradients:
                algorithms = algorithms_by_name(algorithm, members)
            overlap = self.mode == "gradients" if overlap is None else overlap
            options = Options(
                self.mode, local_steps, bucket_mb, overlap, backward_passes_per_step, outer_text(outer), fragments,
                delay, blend, islands is not None,
            )  # fmt: skip
            options.check(members, algorithms)
            if islands is not None:
                require_islands(islands, self.comm, optimizer, algorithms)
            fragment_of = deal_fragments(members, fragments)
            self.outer = outer_optimizer(outer, members)
        warn_of_ddp(members, algorithms.values(), self.comm)
        self._joining = False

        def algorithms_of(joining: Sequence[NamedParameter]) -> Mapping[str, Algorithm]:
            found = algorithms_by_name(algorithm, joining, of_gradients)
            options.check(joining, found)
            return found

        self._synchronizer = self._open_synchronizer(
            parameters, algorithms, options, algorithms_of, fragment_of, islands
        )
        self._synchronizer.inner_steps = InnerSteps.of(optimizer, self._synchronizer.admit_inner_step)

    def _open_synchronizer(
        self,
        parameters: Parameters,
        algorithms: Mapping[str, Algorithm],
        options: Options,
        algorithms_of: AlgorithmsOf,
        fragment_of: Mapping[str, int],
        islands: Communicator | None,
    ) -> Synchronizer:
        comm, members, averages_gradients = self.comm, parameters.trained, options.synchronize == "gradients"
        agreement = open_agreement(self.optimizer, comm, members, str(options), averages_gradients, self.outer)
        overlap, passes = options.overlap, options.backward_passes_per_step
        # of a model on a device backward calls hooks in a thread of its own, and calls need one thread
        on_device = any(member.parameter.device.type != "cpu" for member in members)
        if overlap and (comm.size > 1 or on_device):
            overlap = overlap_by_thread(comm, on_device) or not on_device
        masters = None if averages_gradients else MasterWeights(self.optimizer)
        outer = None
        if masters is not None:
            agreement.members = masters.substitute(members)
            if self.outer is not None:
                masters.replace_in(self.outer)
                outer = OuterStep(self.outer, agreement.members)
        parted = None if islands is None else Islands.of(comm, islands)
        island = None if parted is None else IslandGradients(comm, parted, options.bucket_mb)
        plan = FragmentPlan(options.local_steps, options.fragments, options.delay, options.blend)
        fixed = "which delay= and blend= do not allow: make both optimizers again" if plan.keeps_local else ""

        def between_of(joining: Sequence[NamedParameter]) -> Mapping[str, Algorithm]:
            return between_islands(algorithms_of(joining), parted)

        changes = ParameterChanges(parameters, self.optimizer, between_of, masters, outer, fixed)
        if plan.delay and comm.size > 1:
            overlap_by_thread(comm, on_device)
        one_by_one = not overlap and not plan.keeps_local
        between = between_islands(algorithms, parted)
        reducers = BucketReducers(agreement.members, between, comm, options.bucket_mb, one_by_one, fragment_of)
        parts = SynchronizerParts(self.optimizer, reducers, comm, agreement, parameters, changes, overlap, passes)
        if masters is None:
            return GradientAveraging(parts)
        fragments = Fragments(plan, reducers.fragment_of, comm)
        return LocalUpdates(parts, masters, fragments, outer, island, skips_nonfinite(algorithms))

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each aggregator's vector, in their order."""
        return self._synchronizer.reducers.names

    @property
    @in_own_mode
    def param_groups(self) -> list[ParameterGroup]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups.

        A caller that reads them between backward and step finds averaged gradients with overlap: they are waited for.
        Float32 copies of 16-bit parameters have their gradients then, so that they can be clipped.
        A GradScaler that is about to unscale gradients finds infinities on all ranks or on none.
        """
        if _is_read_by_scaler():
            self._prepare_for_scaler()
        elif self._synchronizer.awaits_averaging:
            self.synchronize()
        else:
            self._synchronizer.show_gradients()
        return self.optimizer.param_groups

    @property
    @in_own_mode
    def _step_supports_amp_scaling(self) -> bool:
        """False. A GradScaler reads it just before it looks for infinities, which are agreed on here."""
        self._prepare_for_scaler()
        return False

    def _prepare_for_scaler(self) -> None:
        """Agree on infinities among the gradients."""
        if self._joining:
            raise RuntimeError(
                f"{self.comm.here}: a GradScaler cannot be combined with join(), where ranks without batches know no "
                "scale; use bfloat16, which needs none, or as many batches on all ranks"
            )
        self._synchronizer.check_before_step()
        self._synchronizer.prepare_for_scaler()

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state by parameter."""
        refuse_distributed_checkpoint(self.comm)
        return self.optimizer.state

    def __getattr__(self, name: str) -> Any:
        # Optimizer.__init__ is not run on the wrapper: hooks and the like live in the wrapped optimizer only.
        if name == "optimizer":
            raise AttributeError(name)
        attribute = getattr(self.optimizer, name)
        return self._synchronizer.inner_steps.guard(name, attribute) if name.endswith("_step") else attribute

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r}, {self.mode}, ranks={self.comm.size})"

    @in_own_mode
    def add_param_group(self, param_group: ParameterGroup) -> None:
        """Add a parameter group while the optimizer trains, on all ranks before the same step.

        Its parameters take part from the next step on, with buckets of their own; those of other parameters stay as
        they are. Make their values equal on all ranks before: :func:`broadcast_parameters`. Parameters that the
        optimizer holds already, frozen, need no group: ``requires_grad_(True)`` suffices.

        Parameters
        ----------
        param_group : dict
            As the wrapped optimizer takes it. Its ``params`` may be pairs of name and parameter, where the wrapped
            optimizer's others have no names too.

        Raises
        ------
        ValueError, TypeError
            The wrapped optimizer rejects the group, a parameter cannot be synchronized, or its name is another one's.
            The optimizer is as before then, and the other ranks raise CollectiveMismatch at their next step. Where
            ranks add different parameters, the next step raises CollectiveMismatch on all.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer
        >>> def train(comm):
        ...     body, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        ...     for parameter in (*body.parameters(), *head.parameters()):
        ...         torch.nn.init.constant_(parameter, 0.5)
        ...     sgd = torch.optim.SGD(head.parameters(), lr=0.1)
        ...     optimizer = DistributedOptimizer(sgd, mpicomp.Dense(), comm, head.named_parameters("head"))
        ...     for step in range(4):
        ...         if step == 2:  # unfreeze the body
        ...             optimizer.add_param_group({"params": body.named_parameters("body"), "lr": 0.01})
        ...         optimizer.zero_grad()
        ...         head(body(torch.full((8, 3), comm.rank + 1.0))).square().mean().backward()
        ...         optimizer.step()
        ...     return [sorted(names) for names in optimizer.buckets]
        >>> mpicomp.run_local(2, train)[0]
        [['head.bias', 'head.weight'], ['body.bias', 'body.weight']]
        """
        self._synchronizer.add_group(param_group, self.optimizer.add_param_group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager in which gradients accumulate: they are added to those that backward brings later.

        Call all ``backward()`` but the last before a step in it, on all ranks.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer
        >>> with mpicomp.Communicator() as comm:
        ...     model = torch.nn.Linear(3, 1)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     optimizer = DistributedOptimizer(sgd, mpicomp.QSGD(), comm)
        ...     with optimizer.no_sync():
        ...         model(torch.ones(2, 3)).sum().backward()
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.step()
        """
        counts = self._synchronizer.gradient_counts
        before, counts.paused = counts.paused, True
        try:
            yield
        finally:
            counts.paused = before

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context manager for a step with the gradients as :meth:`synchronize` and the caller have left them.

        Loops for Horovod step in such a block. A step after :meth:`synchronize` averages nothing in any case: this
        block only checks that it was called.

        Raises
        ------
        RuntimeError
            :meth:`synchronize` has not been called since backward.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer
        >>> with mpicomp.Communicator() as comm:
        ...     model = torch.nn.Linear(3, 1)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     optimizer = DistributedOptimizer(sgd, mpicomp.Dense(), comm)
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.synchronize()
        ...     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        ...     with optimizer.skip_synchronize():
        ...         optimizer.step()
        """
        if self._synchronizer.phase is not Phase.AVERAGED:
            raise RuntimeError(
                f"{self.comm.here}: skip_synchronize() where no gradients have been averaged; call synchronize() after "
                'backward() and before this block, under synchronize="gradients"'
            )
        yield

    @in_own_mode
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, 16-bit ones included.

        Between backward and step this drops the step, which all ranks must do. With overlap, where gradients have been
        sent, it is collective then; residuals are those of before, except Marsit's without ``transactional=True``.

        Parameters
        ----------
        set_to_none : bool
            Set gradients to None, which frees their memory; False: to zeros.

        Raises
        ------
        CollectiveMismatch
            Other ranks make the step.
        RuntimeError
            With overlap under "updates": parameters have moved during backward, and the step has not taken them.
        """
        if self.mode == "updates":
            self._require_nothing_sent("zero_grad", "; wrap a backward() that does not count in no_sync()")
        self._synchronizer.drop_gradients(set_to_none)
        self.optimizer.zero_grad(set_to_none)

    def join(self, batches: Iterable[Batch], after_step: Callable[[], object] | None = None) -> Iterator[Batch]:
        """Go through batches of which the ranks have different numbers, with one step for each.

        A rank whose batches are used up goes on making the steps of the others, without gradients, until nobody has a
        batch left. Its missing gradients count as zeros in means over all ranks; under "updates" it does not move the
        model. Go through to the end on all ranks: one that breaks off is missed by the others.

        Parameters
        ----------
        batches : iterable
            This rank's. The body of the loop calls `step` once.
        after_step : callable, optional
            Function that does the rest of the loop's body which all ranks must do, such as a scheduler's ``step``;
            called for steps that this rank makes without a batch. A GradScaler is refused in the loop.

        Yields
        ------
        Batch
            This rank's batches.

        Raises
        ------
        TypeError
            `batches` cannot be iterated over, or `after_step` is no function; the others then raise CollectiveMismatch.
        CollectiveMismatch, CollectiveTimeout, PeerFailure
            Another rank has broken off its loop.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer
        >>> def train(comm):
        ...     model = torch.nn.Linear(3, 1)
        ...     torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
        ...     optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), mpicomp.Dense(), comm)
        ...     for inputs in optimizer.join([torch.ones(2, 3)] * (1 + 2 * comm.rank)):
        ...         optimizer.zero_grad()
        ...         model(inputs).sum().backward()
        ...         optimizer.step()
        ...     return optimizer.synchronizations
        >>> mpicomp.run_local(2, train)
        [3, 3]
        """
        with self.comm.refusing("join", TypeError):
            own = iter(batches)
            if after_step is not None and not callable(after_step):
                raise TypeError(f"after_step is {shown(after_step)}; pass a function")
        self._joining = True
        try:
            for batch in own:
                self.comm.allreduce(True)  # one more that has a batch
                yield batch
            while self.comm.allreduce(False):
                self._synchronizer.silent_steps = 0  # is due here
                self.zero_grad()
                self.step()
                if after_step is not None:
                    after_step()
        finally:
            self._joining = False

    @in_own_mode
    def synchronize(self) -> None:
        """Average now.

        Under "updates": average the moves of the steps since the last synchronization, fewer than `local_steps`.
        With ``local_steps > 1`` the ranks' models differ between synchronizations: call this before evaluating or
        saving.

        Under "gradients": average the gradients, for instance to clip the norm of their mean. The following `step` then
        takes them as they are, unless :meth:`zero_grad` or a closure comes before. Where a rank has NaN or infinity
        they hold NaN on all ranks, and `step` raises NonFiniteGradient.

        Raises
        ------
        RuntimeError
            Under "updates": gradients have been sent during backward, and the step has not taken them.
        ValueError, CollectiveMismatch, CollectiveTimeout
            As of `step`.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer, broadcast_parameters, require_same
        >>> def train(comm):
        ...     model = torch.nn.Linear(3, 1)
        ...     broadcast_parameters(model, comm)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        ...     optimizer = DistributedOptimizer(sgd, mpicomp.Marsit(), comm, local_steps=4)
        ...     for step in range(6):
        ...         optimizer.zero_grad()
        ...         model(torch.full((8, 3), comm.rank + 1.0)).square().mean().backward()
        ...         optimizer.step()
        ...     optimizer.synchronize()  # before evaluating or saving
        ...     require_same(model, comm)
        ...     return optimizer.synchronizations
        >>> mpicomp.run_local(2, train)[0]
        2
        """
        if self.mode == "gradients":
            self._synchronizer.check_before_synchronizing()
        else:
            self._require_nothing_sent("synchronize")
        self._synchronizer.synchronize()

    @contextmanager
    def common_model(self) -> Iterator[None]:
        """Return a context manager in which the parameters hold the model that all ranks have in common.

        Under "updates" with ``local_steps > 1`` each rank's parameters are its own between two synchronizations. In the
        block they hold the common model of the last one, for instance to evaluate it; afterwards training goes on as
        without the block. Not collective. Do not step or backpropagate in the block. Under "gradients" the model is
        the common one in any case.

        Raises
        ------
        RuntimeError
            Under "updates": gradients have been sent during backward, and the step has not taken them; or `step`,
            :meth:`synchronize` or `load_state_dict` is called in the block.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer, require_same
        >>> def train(comm):
        ...     model = torch.nn.Linear(3, 1)
        ...     for parameter in model.parameters():
        ...         torch.nn.init.constant_(parameter, 0.5)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        ...     optimizer = DistributedOptimizer(sgd, mpicomp.Marsit(), comm, local_steps=4, outer=(0.7, 0.9))
        ...     for step in range(6):
        ...         optimizer.zero_grad()
        ...         model(torch.full((8, 3), comm.rank + 1.0)).square().mean().backward()
        ...         optimizer.step()
        ...     with optimizer.common_model():
        ...         require_same(model, comm)
        ...     return optimizer.models_differ
        >>> mpicomp.run_local(2, train)
        [True, True]
        """
        if self.mode == "updates":
            self._require_nothing_sent("common_model")
        with self._synchronizer.common_model():
            yield


def _is_read_by_scaler() -> bool:
    """Return True if the calling property is read by a GradScaler that is about to unscale gradients.

    Wrappers of `in_own_mode` lie between the property and its reader.
    """
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name == _UNSCALES:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
