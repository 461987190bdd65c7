"""Auto: the faster of dense and compressed communication for each vector, measured in training steps.

Trials run while training goes on: first some dense steps, then some compressed ones. If neither is far ahead, more of
both follow by turns, and of a mixture. Compressing is chosen only if it shortens steps by more than 1 %, and in each
turn; all other vectors are dense, at the cost of `Dense`.

The choice changes only in steps of full precision: the step that leaves compressing also averages the pending errors.

Vectors on a GPU are encoded there if the method can do that; in dense steps they cross to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import Algorithm, Driver, Parts, VectorSpec
from mpicomp.algorithms.dense import Dense
from mpicomp.algorithms.marsit import Marsit
from mpicomp.algorithms.per_node import PerNode
from mpicomp.algorithms.registry import method
from mpicomp.algorithms.wrapping import WrappingMethod, require_residual
from mpicomp.auto.chosen import Chosen, ChosenFeedback, Pending
from mpicomp.auto.trials import Schedule
from mpicomp.codecs.options import integer
from mpicomp.feedback.base import Feedback
from mpicomp.reducers.full_precision_mean import FullPrecisionMean, SkippingMean
from mpicomp.spaces import space_at

_MARSIT = Marsit()


@dataclass(frozen=True)
class Auto(WrappingMethod):
    """Options of the choice between dense and compressed communication, by measured times of training steps.

    Parameters
    ----------
    compressing : Algorithm or str
        Method that may be chosen instead of `Dense`, or its name, which stands for its defaults. Its result must be an
        estimate of the mean.
    trial_steps : int
        Number of measured steps of each side, at least 2; larger if steps are short, and a fifth if a side is far
        ahead.
    retry_every : int or None
        Number of steps R: trials are repeated at steps R, 2 R, 4 R, ..., and at any multiple of R at which training
        steps have become longer or shorter by a factor of more than 1.5 since the choice. None: never.

    Raises
    ------
    ValueError
        An option is out of range, or the method's results are no estimates of the mean.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def train(comm):
    ...     auto = mpicomp.Auto(compressing="qsgd").start(comm, 1000)
    ...     gradient = np.full(1000, comm.rank, np.float32)
    ...     return [float(auto.aggregate(gradient)[0]) for step in range(3)]  # the trials begin dense
    >>> mpicomp.run_local(4, train)[0]
    [1.5, 1.5, 1.5]
    """

    compressing: Algorithm | str = _MARSIT
    trial_steps: int = 20
    retry_every: int | None = 5000

    def __post_init__(self) -> None:
        one = self.compressing
        if isinstance(one, str):
            one = method(one)
            object.__setattr__(self, "compressing", one)
        fits = isinstance(one, Algorithm) and one != Dense() and not isinstance(one, Auto) and one.estimates_mean
        if not fits:
            raise ValueError(
                f"compressing must be a method, or its name, whose results are estimates of the mean, not {one!r}: "
                "the steps before the choice and after it must be of one size"
            )
        require_residual(one, "Auto")
        if isinstance(one, PerNode):
            raise ValueError("choose between nodes: write PerNode(Auto(...)) instead of Auto(PerNode(...))")
        integer(self, "trial_steps", 2)
        integer(self, "retry_every", 1, also=(None,))

    @property
    @override
    def method(self) -> Algorithm:
        """Method that may be chosen."""
        assert isinstance(self.compressing, Algorithm)
        return self.compressing

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Return the parts of the method."""
        return self.method.parts(comm, spec)

    @override
    def assemble(self, comm: Communicator, spec: VectorSpec) -> tuple[Parts, Driver]:
        """Return the method's parts, and a driver that chooses between the method's and an exact mean."""
        parts, compressing = self.method.assemble(comm, spec)
        skips = self.nonfinite == "skip"
        mean = SkippingMean(comm, spec, parts.feedback) if skips else FullPrecisionMean(comm, spec)
        pending = Pending(parts.feedback, comm.size, space_at(spec.device))
        schedule = Schedule(self.trial_steps, self.retry_every)
        wire = self.method.wire if isinstance(self.method, Dense) else None
        name = wire or type(self.method).__name__.lower()
        driver = Chosen(comm, spec, pending, compressing, mean, schedule, name)
        return parts._replace(feedback=cast(Feedback, ChosenFeedback(parts.feedback, driver))), driver
