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

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from collectives import Communicator
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.front_ends import (
    AlgorithmChoice,
    algorithms_by_name,
    explain_missing_algorithm,
    given_communicator,
    names_by_parameter,
    preferred_mode,
    require_optimizer,
    warn_of_ddp,
)
from mpicomp.torch.local_steps.fragments import Blend, deal_fragments
from mpicomp.torch.local_steps.islands import find_islands, islands_text
from mpicomp.torch.local_steps.outer_step import Outer, outer_optimizer, outer_text
from mpicomp.torch.local_steps.second_views import refuse_second_views
from mpicomp.torch.optimizer.loop_methods import LoopMethods
from mpicomp.torch.optimizer.opening import open_synchronizer
from mpicomp.torch.optimizer.options import Options
from mpicomp.torch.parameters import ParameterGroup, Parameters
from mpicomp.torch.synchronizer.inner_steps import InnerSteps
from mpicomp.torch.synchronizer.property_readers import is_read_by_scaler, refuse_distributed_checkpoint


class DistributedOptimizer(LoopMethods):
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
        ``model.named_parameters()``: names for error messages, states and choices of algorithms. None: those with which
        `optimizer` was made, if all differ.
    synchronize : "gradients" or "updates", optional
        None: the mode that the algorithm prefers.
    local_steps : int
        Optimizer steps between two synchronizations, under "updates".
    bucket_mb : float
        Largest bucket in MiB. A tensor larger than that has its own. A model of less than 8 times as much has 8 buckets
        if these are then no smaller than 1 MiB, or without `overlap` 8 MiB.
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
    islands : Communicator, torch.distributed.ProcessGroup or DeviceMesh, optional
        Under "updates", the communicator of this rank's island, a part of `comm` that fast links join, such as
        ``comm.nodes.local``, or its process group, as NCCL's ``mesh["gpu"]``. Gradients are averaged within the island
        at every step, by the process group if one is passed, and the algorithm runs between islands, whose ranks each
        carry a share of the vector. Closing it is the caller's.

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
        of range; the other ranks then raise CollectiveMismatch. Under "updates" also for an optimizer that keeps a
        second view of the model, such as an average of the weights.
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
        islands: Communicator | ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.comm = given_communicator(comm, "DistributedOptimizer", optimizer, algorithm)
        with self.comm.refusing("wrapping an optimizer", ValueError, TypeError, where=self.comm.here):
            require_optimizer(optimizer, algorithm)
            _require_plain(optimizer)
            parameters = Parameters(optimizer, names_by_parameter(named_parameters))
            members = parameters.trained
            algorithms = algorithms_by_name(algorithm, members, of_gradients=False)
            self.mode = preferred_mode(algorithms) if synchronize is None else synchronize
            of_gradients = self.mode == "gradients"
            if of_gradients:
                algorithms = algorithms_by_name(algorithm, members)
            elif self.comm.size > 1:
                refuse_second_views(optimizer, self.comm.here)
            options = Options(
                self.mode, local_steps, bucket_mb, of_gradients if overlap is None else overlap,
                backward_passes_per_step, outer_text(outer), fragments, delay, blend, islands_text(islands),
            )  # fmt: skip
            options.check(members, algorithms)
            island = None if islands is None else find_islands(islands, self.comm, optimizer, members, algorithms)
            fragment_of = deal_fragments(members, fragments)
            self.outer = outer_optimizer(outer, members)
        warn_of_ddp(members, algorithms.values(), self.comm)
        self._synchronizer = open_synchronizer(
            optimizer, self.comm, parameters, algorithm, algorithms, options, self.outer, fragment_of, island
        )
        self._synchronizer.inner_steps = InnerSteps.of(optimizer, self._synchronizer.admit_inner_step)

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
        if is_read_by_scaler():
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


def _require_plain(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if the optimizer synchronizes the ranks already."""
    if isinstance(optimizer, DistributedOptimizer):
        raise TypeError("the optimizer is a DistributedOptimizer already; wrap a plain one, once")
    if getattr(optimizer, "synchronizes_ranks", False):
        raise TypeError(f"{type(optimizer).__name__} synchronizes the ranks itself; use it as it is")
