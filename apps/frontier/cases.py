"""Cases of the record: each method, at each number of local steps that is of interest for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from apps.frontier.tasks import Task
from collectives import Communicator
from mpicomp import Dense, DoubleSqueeze, Marsit, PowerSGD, Relay, ScaleCom, SparseLoCo
from mpicomp.algorithms import Algorithm
from mpicomp.contrib.ef21 import EF21
from mpicomp.torch import DistributedLion, DistributedOptimizer, OneBitAdam, ZeroOneAdam
from mpicomp.torch.one_bit_adam.zero_one_moments import Intervals

DENSE = "dense"
OUTER = ", outer"
"""End of the name of a method whose local steps have an outer optimizer."""
OUTER_PAIRS = ((1.0, 0.3), (0.7, 0.6), (0.7, 0.9))
"""Rates and momenta of outer optimizers that are tried for each method, at its best rate without one."""
GRADIENTS = 0
"""Local steps of a method that averages the gradients of every step."""
ALGORITHMS: dict[str, Algorithm] = {
    DENSE: Dense(),
    "float16": Dense("float16"),
    "PowerSGD": PowerSGD(4),
    "Marsit": Marsit(None, gamma=2.0, clip=1.0),
    "Marsit, K = 100": Marsit(100),
    "1 winner": Marsit(None, gamma=2.0, clip=1.0, winners=1),
    "2 winners": Marsit(None, gamma=2.0, clip=1.0, winners=2),
    "Relay(2, copy)": Relay(2, 256, residual="copy"),
    "Relay(3)": Relay(3),
    "Relay(4)": Relay(4),
    "Relay(16)": Relay(16),
    "DoubleSqueeze": DoubleSqueeze(),
    "DoubleSqueeze(4 levels)": DoubleSqueeze("levels:levels=4,bucket=128"),
    "ScaleCom": ScaleCom(100),
    "SparseLoCo": SparseLoCo(),
}
"""Methods in the place of the dense average."""
Parameters = Iterable[nn.Parameter]
Make = Callable[[Parameters, float, Communicator, int], Any]
"""It is called with the rate and, after the communicator, the steps of the training."""


def warm_up(steps: int) -> int:
    """Steps in which 1-bit and 0/1 Adam make the second moments: a fifth of the training."""
    return max(1, steps // 5)


def _one_bit_adam(parameters: Parameters, lr: float, comm: Communicator, steps: int) -> Any:
    options: Any = {"weight_decay": 0.01, "decoupled_weight_decay": True}
    return OneBitAdam(parameters, lr, warmup_steps=warm_up(steps), **options, comm=comm)


def intervals(steps: int) -> Intervals:
    """Return the intervals of 0/1 Adam in a training of so many steps; with 600 steps they grow to 8."""
    return Intervals(warm_up(steps), variance_doubling=16, local_doubling=120, most_local_steps=16)


def _zero_one_adam(parameters: Parameters, lr: float, comm: Communicator, steps: int) -> Any:
    return ZeroOneAdam(parameters, lr, weight_decay=0.01, **asdict(intervals(steps)), comm=comm)


def _lion(parameters: Parameters, lr: float, comm: Communicator, steps: int) -> Any:
    # each step has the length of the rate: its authors use a third to a tenth of AdamW's, and as much more decay
    return DistributedLion(parameters, 0.2 * lr, weight_decay=0.05, comm=comm)


def _ef21(parameters: Parameters, lr: float, comm: Communicator, steps: int) -> Any:
    # the mean of eta = 0.1 takes the place of the momentum, and is a tenth as long
    return _of_gradients(torch.optim.SGD(parameters, lr=10 * lr), EF21("top-k:rate=100"), comm)


def _masked(rate: int, parameters: Parameters, lr: float, comm: Communicator, steps: int) -> Any:
    inner = torch.optim.SGD(parameters, lr=lr)
    return _of_gradients(inner, ScaleCom(rate, momentum=0.9, masking=True), comm)


OPTIMIZERS: dict[str, Make] = {"1-bit Adam": _one_bit_adam, "0/1 Adam": _zero_one_adam, "Lion": _lion}
"""Methods that are optimizers of their own, for the task of AdamW."""
MOMENTA: dict[str, Make] = {"EF21": _ef21} | {
    f"ScaleCom({rate}), masked": partial(_masked, rate) for rate in (65, 100, 400)
}
"""Methods with a momentum of their own, for the tasks of SGD with momentum."""
DEFINITIONS = {
    "1-bit Adam": "1-bit Adam, warm-up of a fifth of the steps",
    "0/1 Adam": "0/1 Adam, warm-up of a fifth of the steps, local steps double every 120",
    "Lion": "Lion, 0.2 times the rate",
    "EF21": "EF21(top-k:rate=100), 10 times the rate",
}
"""Options of methods that bring an optimizer: runs with others are not of the record."""


def own_optimizers(task: str) -> dict[str, Make]:
    """Return the methods of a task that bring an optimizer or its momentum."""
    return OPTIMIZERS if task == "gpt" else MOMENTA


@dataclass(frozen=True)
class Case:
    """A method with its local steps, ranks and topology."""

    task: str
    method: str
    local_steps: int
    ranks: int = 4
    topology: Any = "ring"
    outer: tuple[float, float] | None = None

    @property
    def base(self) -> str:
        """The method without an outer optimizer."""
        return self.method.removesuffix(OUTER)

    @property
    def tuned_at(self) -> int:
        """Local steps of the trainings that choose the rate: one choice serves 10 and more."""
        return min(self.local_steps, 10)

    @property
    def title(self) -> str:
        """Method and H."""
        return self.method if self.local_steps == GRADIENTS else f"{self.method}, H = {self.local_steps}"

    @property
    def exact(self) -> Case:
        """The dense average of the same steps."""
        return replace(self, method=DENSE, topology="ring")

    @property
    def definition(self) -> str:
        """The method with all its options."""
        if self.base in ALGORITHMS:
            return repr(ALGORITHMS[self.base])
        return DEFINITIONS.get(self.method, self.method)


class Exchange(Enum):
    """Content of the exchange of a step."""

    NOTHING = "nothing"
    OWN = "the message of the method"
    EXACT = "exact"


def exchanges(method: str, local_steps: int, steps: int, evaluated: int) -> list[Exchange]:
    """Return the exchange of each step of a training, of a method of `ALGORITHMS` or `own_optimizers`."""
    if method == "1-bit Adam":
        exact = warm_up(steps)
        return [Exchange.EXACT] * exact + [Exchange.OWN] * (steps - exact)
    if method == "0/1 Adam":
        when = intervals(steps)
        first = range(1, when.warmup_steps + 1)
        found = [Exchange.EXACT if when.updates_variance(step) else Exchange.OWN for step in first]
        for step in range(when.warmup_steps + 1, steps + 1):
            is_due = when.synchronizes(step - when.warmup_steps) or step % evaluated == 0  # for a common model
            found.append(Exchange.OWN if is_due else Exchange.NOTHING)
        return found
    every = max(local_steps, 1)
    algorithm = ALGORITHMS.get(method.removesuffix(OUTER))
    period = algorithm.full_precision_every if isinstance(algorithm, Marsit) else None
    found = [Exchange.NOTHING] * steps
    for number, step in enumerate(range(every - 1, steps, every)):
        found[step] = Exchange.OWN if period is None or number % period else Exchange.EXACT
    return found


def make_optimizer(case: Case, task: Task, model: nn.Module, lr: float, comm: Communicator, steps: int) -> Any:
    """Return the optimizer of a case, which communicates in its `step`, for a training of so many steps."""
    own = own_optimizers(task.name)
    if case.method in own:
        return own[case.method](model.parameters(), lr, comm, steps)
    inner = task.optimizer(model.parameters(), lr)
    if not case.local_steps:
        return _of_gradients(inner, ALGORITHMS[case.method], comm)
    options: dict[str, Any] = {"synchronize": "updates", "local_steps": case.local_steps, "outer": case.outer}
    return DistributedOptimizer(inner, ALGORITHMS[case.base], comm, **options, overlap=False)


def _of_gradients(inner: torch.optim.Optimizer, algorithm: Algorithm, comm: Communicator) -> DistributedOptimizer:
    # without overlap, so that ranks that are threads need no further threads
    return DistributedOptimizer(inner, algorithm, comm, synchronize="gradients", overlap=False)


_LOCAL = (DENSE, "Relay(4)", "Relay(3)", "Relay(2, copy)", "Marsit", "DoubleSqueeze(4 levels)")
_SHORT = ("SparseLoCo", "2 winners", "1 winner", "float16", "PowerSGD", "ScaleCom", "DoubleSqueeze")
_OF_GRADIENTS = ("float16", "PowerSGD", "ScaleCom", "Marsit, K = 100", "DoubleSqueeze", "Marsit", "Relay(4)")


def cases_of(task: str) -> list[Case]:
    """Return the cases of a task, those first that decide."""
    found = [Case(task, method, steps) for steps in (10, 30) for method in (DENSE, "Relay(4)")]
    found += [Case(task, DENSE, GRADIENTS), Case(task, "Relay(16)", GRADIENTS)]
    found += [Case(task, method, 10) for method in ("Marsit", "Relay(3)")]
    found += [Case(task, method, steps) for steps in (10, 30) for method in _LOCAL]
    found += [Case(task, method, 100) for method in (DENSE, "Relay(4)")]
    found += [Case(task, method, 1) for method in (DENSE, "Relay(4)", "Relay(3)", "Relay(2, copy)", "Marsit")]
    found += [Case(task, method + OUTER, steps) for steps in (30, 100, 10) for method in (DENSE, "Relay(4)")]
    found += [Case(task, method, GRADIENTS) for method in ("float16", "PowerSGD", *own_optimizers(task))]
    found += [Case(task, "SparseLoCo", 30)]
    if task == "gpt":
        found += [Case(task, "Relay(4)", 10, 8, "halving-doubling"), Case(task, DENSE, 10, 8)]
    found += [Case(task, method, GRADIENTS) for method in _OF_GRADIENTS]
    found += [Case(task, method, 100) for method in _LOCAL]
    found += [Case(task, method, 10) for method in _SHORT]
    found += [Case(task, "2 winners", 30)]
    return list(dict.fromkeys(found))
