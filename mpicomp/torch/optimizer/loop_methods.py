"""Methods of a wrapped optimizer that training loops call next to ``step``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from collectives.errors import explains_itself
from collectives.quoting import shown
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.parameters import ParameterGroup
from mpicomp.torch.synchronizer.synchronizer import Phase, Synchronizer
from mpicomp.torch.synchronizer.synchronizing_optimizer import SynchronizingOptimizer

Batch = TypeVar("Batch")


class LoopMethods(SynchronizingOptimizer[Synchronizer]):
    """Optimizer that wraps another one, with the methods that loops call."""

    optimizer: torch.optim.Optimizer
    mode: str
    _joining = False  # in a loop of `join`

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

    def no_sync(self) -> AbstractContextManager[None]:
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
        return self._synchronizer.gradient_counts.pause()

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
            `batches` cannot be iterated over, `after_step` is no function, or the optimizer is LBFGS; the others then
            raise CollectiveMismatch.
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
            if isinstance(self.optimizer, torch.optim.LBFGS):
                raise TypeError("ranks without batches lack the closure that LBFGS needs; use another optimizer")
        self._joining = True
        try:
            for batch in own:
                self.comm.allreduce(True)  # one more that has a batch
                yield batch
            while self.comm.allreduce(False):
                self._synchronizer.gradient_counts.silent_steps = 0  # they are due here
                self.zero_grad()
                try:
                    self.step()
                except Exception as error:
                    # such as that of an optimizer that lacks a closure: the others may evaluate theirs again
                    if self.comm.recovery is None and not explains_itself(error):
                        self.comm.ending.give_up(error)
                    raise
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
