"""Base of optimizers and hooks: their diagnostics and traffic."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Sequence

from collectives import Communicator
from collectives.errors import refuse_copies
from collectives.execution.traffic import TrafficLog
from mpicomp.aggregator.base import Aggregator
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.watch import Diagnostics, TrainingWatch, given_watch

_INTERNAL = {"counted", "reducers"}


class _WithoutInternals(ABCMeta):
    """Class that leaves names of this library's own use out of completion at a prompt."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]


@refuse_copies(lambda one: one.comm.here, "copy or save its state_dict(), or leave it out")
class NonCopyable(metaclass=_WithoutInternals):
    """Base of objects that communicate: a copy or a pickle would lose its place among the ranks' calls."""

    comm: Communicator
    _watch: TrainingWatch | None = None

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """One aggregator per vector."""
        return tuple(reducer.aggregator for reducer in self.reducers)

    @property
    @abstractmethod
    def reducers(self) -> Sequence[BucketReducer]:
        """The reducers of all steps."""

    @property
    def counted(self) -> Iterable[Aggregator]:
        """The aggregators of all steps."""
        return [one.aggregator for one in self.reducers]

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def diagnostics(self, every: int | None = None, audit_every: int | None = None) -> Diagnostics:
        """Watch the training from the first call on, and return the last measurements.

        Call it after every step, or every few. Nothing is watched before the first call. A `UserWarning` with the cure
        is issued once if a residual grows without bound, which comes before a training diverges.

        Parameters
        ----------
        every : int, optional
            Averages of a bucket from one measurement to the next; None: as in the first call, which takes 10.
        audit_every : int, optional
            Averages from one audit to the next, which compares means with exact ones, in one all-reduce of a sample.
            None: as in the first call, which takes 0, for no audits. With audits all ranks must call this function,
            and with a delay ``state_dict``, after the same steps.

        Returns
        -------
        Diagnostics
            Norms of means and residuals, cosine of the last audit.

        Raises
        ------
        ValueError
            A number is out of range, or is not that of the first call.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer
        >>> def train(comm):
        ...     weights = torch.nn.Parameter(torch.linspace(1, 2, 3000))
        ...     sgd = torch.optim.SGD([weights], lr=0.1)
        ...     optimizer = DistributedOptimizer(sgd, mpicomp.Relay(16), comm, synchronize="gradients")
        ...     for step in range(4):
        ...         optimizer.zero_grad()
        ...         weights.square().sum().backward()
        ...         optimizer.step()
        ...         found = optimizer.diagnostics(every=1, audit_every=2)
        ...     return found
        >>> found = mpicomp.run_local(2, train)[0]
        >>> found.audits, found.cosine > 0.9, found.residual_ratio < 1
        (1, True, True)
        """
        with self.comm.refusing("diagnostics", ValueError, where=self.comm.here):
            watch = given_watch(self._watch, every, audit_every)
        self._watch = watch
        return watch.look(self.reducers, self.comm)

    @property
    def traffic(self) -> TrafficLog:
        """Bytes, messages and seconds of this rank's averages of gradients, updates or momenta.

        ``traffic.last`` is the cost of the last synchronization, with fragments of the last one of each fragment, and
        ``traffic.total`` that of all of them; both are zero before the first. Checks of calls count, broadcasts and
        sums of your own do not. Vectors in flight at once wait at once, so that their seconds add up to more than the
        time that passes. Nothing is counted for this that is not counted in any case.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer
        >>> def train(comm):
        ...     weights = torch.nn.Parameter(torch.ones(3000))
        ...     optimizer = DistributedOptimizer(torch.optim.SGD([weights]), mpicomp.Dense(), comm)
        ...     for step in range(2):
        ...         weights.sum().backward()
        ...         optimizer.step()
        ...     return optimizer.traffic
        >>> traffic = mpicomp.run_local(2, train)[0]
        >>> traffic.last.bytes_sent >= 12_000, traffic.total.bytes_sent >= 24_000
        (True, True)
        """
        found = TrafficLog()
        for one in self.aggregators:
            found.last.add(one.traffic.last)
        for one in self.counted:
            found.total.add(one.traffic.total)
        return found
