"""Auto: dense or compressed, vector by vector, whichever makes training steps shorter.

What a step takes is measured while training goes on: first some steps dense, then some compressed, and, where neither
is far ahead, more of both by turns, and of a mixture. Compressing is chosen only if it makes steps shorter by more than
1 % and in each turn; the rest is dense, and costs what `Dense` costs.

The choice changes in steps of full precision alone: a step that leaves compressing behind averages what is pending too.

Vectors on a GPU are encoded there if the method can do that; in dense steps they cross to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives import Communicator
from collectives.arrays import named
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, Synchronize, VectorSpec
from mpicomp.algorithms.dense import Dense
from mpicomp.algorithms.marsit import Marsit
from mpicomp.algorithms.registry import method
from mpicomp.auto.chosen import Chosen
from mpicomp.auto.chosen_feedback import ChosenFeedback
from mpicomp.auto.pending import Pending
from mpicomp.auto.trials import Schedule
from mpicomp.codecs.options import integer
from mpicomp.reducers.full_precision_mean import FullPrecisionMean, SkippingMean, staged

_MARSIT = Marsit()


@dataclass(frozen=True)
class Auto(Algorithm):
    """Options of the choice.

    Parameters
    ----------
    compressing : Algorithm or str
        The method that may be chosen instead of `Dense`, or its name, with its defaults. Its result must be an
        estimate of the mean.
    trial_steps : int
        Steps of each side that are measured, at least 2; more where steps are short, and a fifth where a side is far
        ahead.
    retry_every : int or None
        So many steps, twice, four times, ... as many after the first one, the choice is made anew; and at any multiple
        of it if training steps take 1.5 times as long, or as short, as when the choice was made. None: never.

    Raises
    ------
    ValueError
        An option is out of range, or the method's results are no estimates of the mean.
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
        integer(self, "trial_steps", 2)
        integer(self, "retry_every", 1, also=(None,))

    @property
    def method(self) -> Algorithm:
        """The method that may be chosen."""
        assert isinstance(self.compressing, Algorithm)
        return self.compressing

    @property
    def synchronize(self) -> Synchronize:  # type: ignore[override]
        """What the method is best given."""
        return self.method.synchronize

    @property
    def uses_tensor_lengths(self) -> bool:
        """As for the method."""
        return self.method.uses_tensor_lengths

    @property
    def nonfinite(self) -> str:
        """What becomes of a step with NaN or infinity, as for the method: "raise" or "skip"."""
        return str(getattr(self.method, "nonfinite", "raise"))

    def encodes_on_devices(self, dtype: str) -> bool:
        """See `Algorithm`: as for the method."""
        return self.method.encodes_on_devices(dtype)

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Those of the method, and an exact mean beside its reducer."""
        compressing = self.method.parts(comm, spec)
        skips = self.nonfinite == "skip"
        dense = staged(SkippingMean(comm, compressing.feedback) if skips else FullPrecisionMean(comm), spec)
        device = None if spec.device == "cpu" else named(spec.device)
        pending = Pending(compressing.feedback, comm.size, device)
        schedule = Schedule(self.trial_steps, self.retry_every)
        name = getattr(self.method, "wire", None) or type(self.method).__name__.lower()
        reducer = Chosen(comm, spec, pending, compressing.reducer, dense, schedule, name)
        return Parts(ChosenFeedback(compressing.feedback, reducer), compressing.codec, reducer)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """Of the method; see `Algorithm.message_model`."""
        return self.method.message_model(n, dtype, ranks, piece_bytes)
