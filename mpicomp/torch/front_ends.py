"""Arguments that the optimizers and the DDP hook share, checked before anything is made of them."""

from __future__ import annotations

import functools
import gc
import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.caller_warning import warn_caller
from collectives.errors import marked
from collectives.execution.traffic import TrafficLog
from collectives.quoting import nearest, one_line
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms import NAMES, SSDM, Algorithm, Dense, PerNode
from mpicomp.torch.buckets.bucket_reducers import BucketReducer
from mpicomp.torch.parameters import NARROW, NamedParameter, require_own_gradients
from mpicomp.torch.watch import Diagnostics, TrainingWatch, given_watch

AlgorithmChoice = Algorithm | Mapping[str, Algorithm] | Callable[[str, Tensor], Algorithm]
"""One for all parameters; by patterns of names, of which the first that fits counts; or by name and parameter."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_INTERNAL = {"counted", "reducers"}
_USAGE = "DistributedOptimizer(optimizer, algorithm, comm, named_parameters)"


class _WithoutInternals(ABCMeta):
    """Class that leaves names of this library's own use out of completion at a prompt."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]


class NonCopyable(metaclass=_WithoutInternals):
    """Base of objects that communicate: a copy or a pickle would lose its place among the ranks' calls."""

    comm: Communicator
    _watch: TrainingWatch | None = None

    @property
    @abstractmethod
    def aggregators(self) -> tuple[Aggregator, ...]:
        """One aggregator per vector."""

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
        return watch.look(self)

    @property
    def traffic(self) -> TrafficLog:
        """Bytes, messages and seconds of this rank's averages of gradients, updates or momenta.

        ``traffic.last`` is the cost of the last synchronization, ``traffic.total`` that of all of them; both are zero
        before the first. Checks of calls count, broadcasts and sums of your own do not. Vectors in flight at once wait
        at once, so that their seconds add up to more than the time that passes. Nothing is counted for this that is
        not counted in any case.

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

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # by which copy and pickle take any object
        raise TypeError(
            f"{self.comm.here}: {type(self).__name__}, which communicates, is not copied or pickled; copy or save its "
            "state_dict(), or leave it out"
        )


# Algorithms of parameters ---------------------------------------------------------------------------------------------


def algorithms_by_name(
    choice: AlgorithmChoice, members: Sequence[NamedParameter], of_gradients: bool = True
) -> dict[str, Algorithm]:
    """Return the algorithm of each parameter, with its defaults for gradients unless these are not averaged.

    Raises
    ------
    ValueError
        No pattern fits a parameter, or its choice is not an algorithm.
    """
    found = {member.name: _choose(choice, member) for member in members}
    for name, algorithm in found.items():
        if not isinstance(algorithm, Algorithm):
            raise ValueError(
                f"the algorithm of {name!r} is {algorithm!r}; choose an instance, such as mpicomp.Marsit() or "
                'mpicomp.algorithm("marsit")'
            )
        if getattr(getattr(algorithm, "compressing", algorithm), "rates", None) is not None:
            raise ValueError(
                "rates by position do not fit buckets that are laid out by the order of gradients; choose by "
                "parameter: algorithm=lambda name, parameter: mpicomp.ScaleCom(rate=rates[name])"
            )
    return {name: one.of_gradients() for name, one in found.items()} if of_gradients else found


def _choose(choice: AlgorithmChoice, member: NamedParameter) -> Algorithm:
    if isinstance(choice, Algorithm):
        return choice
    if isinstance(choice, Mapping):
        for pattern, algorithm in choice.items():
            if fnmatchcase(member.name, str(pattern)):
                return algorithm
        raise ValueError(
            f"no pattern among {', '.join(map(repr, choice))} fits {member.name!r}; end the choices with '*'"
        )
    try:
        return choice(member.name, member.parameter)
    except Exception as error:  # of the user's function
        raise ValueError(
            f"no algorithm is chosen for {member.name!r} ({type(error).__name__}: {one_line(error)}); pass a function "
            "of name and parameter that returns one for each"
        ) from error


def preferred_mode(algorithms: Mapping[str, Algorithm]) -> str:
    """Return the mode that the algorithms prefer, "updates" or "gradients"; full precision takes part in either.

    Raises
    ------
    ValueError
        They differ.
    """
    modes = {one.synchronize: one for one in algorithms.values() if not _is_dense(one)}
    if len(modes) > 1:
        differing = " and ".join(f'{one} "{mode}"' for mode, one in modes.items())
        raise ValueError(
            f'the algorithms differ in what they prefer ({differing}); pass synchronize="gradients" or "updates"'
        )
    return next(iter(modes), "gradients")


def _is_dense(algorithm: Algorithm) -> bool:
    return isinstance(getattr(algorithm, "method", algorithm), Dense)


# Types of arguments ---------------------------------------------------------------------------------------------------


def given_communicator(comm: Communicator | None, call: str, *others: object) -> Communicator:
    """Return the communicator, or a new one of all ranks for None; raise TypeError, which names the call, otherwise."""
    if comm is None:
        return Communicator()
    require_communicator(comm, call, _USAGE, *others)
    return comm


def explain_missing_algorithm(initialize: _Function) -> _Function:
    """Return an initializer that names the call where there is no algorithm, as in programs for Horovod."""

    @functools.wraps(initialize)
    def run(self: object, *args: Any, **kwargs: Any) -> None:
        if len(args) < 2 and "algorithm" not in kwargs:
            raise marked(TypeError(f"the algorithm is missing, such as mpicomp.Relay(): write {_USAGE}"))
        initialize(self, *args, **kwargs)

    return cast(_Function, run)


def warn_of_ddp(members: Sequence[NamedParameter], algorithms: Iterable[Algorithm], comm: Communicator) -> None:
    """Warn on rank 0 if DistributedDataParallel also averages these parameters over as many ranks.

    Under PerNode it may do so within the node, which has all ranks where a program for several nodes runs on one.
    Parameters do not refer to the wrapper, so it is searched for where PyTorch has the process group that it needs.
    """
    if comm.rank or comm.size == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    if len(comm.layout.sizes) == 1 and all(isinstance(one, PerNode) for one in algorithms):
        return
    ours = {id(member.parameter) for member in members}
    for wrapper in [one for one in gc.get_objects() if type(one) is DistributedDataParallel]:
        averages = wrapper.process_group.size() == comm.size and not getattr(wrapper, "_comm_hooks", ())
        if averages and not ours.isdisjoint(map(id, wrapper.parameters())):
            warn_caller(
                f"{comm.here}: DistributedDataParallel also sends every gradient, uncompressed: train "
                "the model without it (ddp.module), or keep it with a plain optimizer and mpicomp.torch.ddp_hook",
                UserWarning,
            )
            return


def require_optimizer(optimizer: object, algorithm: object) -> None:
    """Raise TypeError unless the arguments are an optimizer and an algorithm, or a choice of algorithms."""
    if isinstance(optimizer, Algorithm) or hasattr(algorithm, "param_groups"):
        raise TypeError(f"the optimizer comes before the algorithm: write {_USAGE}")
    require_torch_optimizer(optimizer)
    require_algorithm(algorithm)


def require_torch_optimizer(optimizer: object) -> None:
    """Raise TypeError unless the argument is an instance of a torch optimizer."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        given = (
            f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"of type {type(optimizer).__name__}"
        )
        raise TypeError(
            f"the optimizer is {given}: pass an instance of a torch optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )


def require_algorithm(algorithm: object) -> None:
    """Raise TypeError unless the argument is an algorithm, or a choice of algorithms by parameter."""
    if isinstance(algorithm, str):
        name = algorithm if algorithm in NAMES else nearest(algorithm, NAMES) or "marsit"
        raise TypeError(f"the algorithm is text, {algorithm!r}: pass an instance, mpicomp.algorithm({name!r})")
    if isinstance(algorithm, Iterator) or (isinstance(algorithm, list | tuple) and algorithm):
        raise TypeError(
            f"the algorithm is a {type(algorithm).__name__}, as named parameters are, which come fourth: write {_USAGE}"
        )
    if isinstance(algorithm, type):
        raise TypeError(f"the algorithm is a class: write {algorithm.__name__}(), with parentheses")
    chosen_by = isinstance(algorithm, Mapping) or (callable(algorithm) and not isinstance(algorithm, torch.nn.Module))
    if not isinstance(algorithm, Algorithm) and not chosen_by:
        raise TypeError(f"the algorithm is of type {type(algorithm).__name__}: pass a method, such as mpicomp.Marsit()")


def require_bucket_size(bucket_mb: object) -> None:
    """Raise ValueError unless the argument is a positive number."""
    if not isinstance(bucket_mb, int | float) or not bucket_mb > 0:
        raise ValueError(f"bucket_mb is {bucket_mb!r}; a bucket needs a positive size")


def names_by_parameter(
    named_parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None,
) -> dict[Tensor, str]:
    """Return the name of each parameter; raise TypeError unless all have names."""
    if named_parameters is None:
        return {}
    cure = "pass model.named_parameters()"
    if inspect.ismethod(named_parameters):
        raise TypeError(f"named_parameters is a method: {cure}, with the parentheses")
    if isinstance(named_parameters, torch.nn.Module):
        raise TypeError(f"named_parameters is the model: {cure}")
    try:
        pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
        found = {}
        for pair in pairs:
            if isinstance(pair, Tensor):
                raise TypeError(f"named_parameters are tensors without names: {cure}, not model.parameters()")
            name, parameter = pair
            found[parameter] = str(name)
        return found
    except ValueError:
        raise TypeError(f"named_parameters are no pairs of name and tensor: {cure}") from None


# Options of an optimizer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Options of a DistributedOptimizer, in its names; the ranks compare them as text."""

    synchronize: str
    local_steps: int
    bucket_mb: float
    overlap: bool
    backward_passes_per_step: int
    outer: str = "None"
    fragments: int = 1
    delay: int = 0
    blend: float | Literal["steps"] = 0.0
    islands: bool = False

    def __str__(self) -> str:
        texts = vars(self) | {"synchronize": repr(self.synchronize), "bucket_mb": f"{self.bucket_mb:g}"}
        return f"DistributedOptimizer({', '.join(f'{name}={text}' for name, text in texts.items())})"

    @property
    def moves_in_backward(self) -> bool:
        """Flag: the optimizer moves parameters during backward."""
        return self.overlap and self.synchronize == "updates"

    def check(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
        """Raise ValueError if an option is out of range, or does not fit other options, parameters or algorithms."""
        mode, local_steps, passes = self.synchronize, self.local_steps, self.backward_passes_per_step
        if mode not in ("gradients", "updates"):
            raise ValueError(f'synchronize is {mode!r}; choose "gradients", "updates" or None')
        for name, count in (("local_steps", local_steps), ("backward_passes_per_step", passes)):
            if not isinstance(count, Integral) or count < 1:
                raise ValueError(f"{name} is {count!r}; choose a whole number, 1 or more")
        if local_steps > 1 and mode == "gradients":
            raise ValueError(
                f'local_steps={local_steps} needs synchronize="updates"; under "gradients" accumulate by '
                f"backward_passes_per_step={local_steps}"
            )
        if self.outer != "None" and mode == "gradients":
            raise ValueError(
                f'outer={self.outer} needs synchronize="updates"; under "gradients" the optimizer itself has momentum'
            )
        self._check_fragments()
        if self.islands and (mode == "gradients" or self.overlap):
            raise ValueError('islands need synchronize="updates", and cannot be combined with overlap=True')
        require_bucket_size(self.bucket_mb)
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap is {self.overlap!r}; choose True, False or None")
        if mode == "updates":
            _require_scales(algorithms)
            leaving = next((one for one in algorithms.values() if one.leaves_residual), None)
            if leaving is not None and (self.islands or self.delay or self.blend):
                raise ValueError(f"{leaving} cannot be combined with islands, delay or blend: pass residual='own'")
        else:
            for member in members:
                require_own_gradients(member.name, member.parameter, ', or use synchronize="updates"')
        if not self.moves_in_backward:
            return
        cure = 'under "updates"; pass overlap=False'
        for member in members:
            if member.parameter.dtype in NARROW:
                raise ValueError(
                    f"{member.name!r} is of {member.parameter.dtype}, which cannot be combined with overlap {cure}"
                )
        if skips_nonfinite(algorithms):
            raise ValueError(f"nonfinite='skip' cannot be combined with overlap {cure}")

    def _check_fragments(self) -> None:
        """Raise ValueError unless the fragments fit into the local steps, and the delay between two rounds."""
        fragments, delay, blend, steps = self.fragments, self.delay, self.blend, self.local_steps
        if not isinstance(fragments, Integral) or fragments < 1:
            raise ValueError(f"fragments is {fragments!r}; choose a whole number, 1 or more")
        if not isinstance(delay, Integral) or delay < 0:
            raise ValueError(f"delay is {delay!r}; choose a whole number of steps, 0 or more")
        if blend != "steps" and (not isinstance(blend, Real) or not 0 <= blend < 1):
            raise ValueError(f"blend is {blend!r}; choose a number from 0 up to, not including, 1, or 'steps'")
        if self.synchronize == "gradients" and (fragments > 1 or delay or blend):
            raise ValueError('fragments, delay and blend need synchronize="updates", with local_steps')
        if fragments > steps:
            raise ValueError(
                f"fragments={fragments} is more than local_steps={steps}, and a step would synchronize several "
                "fragments; choose fewer, or more local steps"
            )
        if delay >= steps:
            raise ValueError(
                f"delay={delay} is no less than local_steps={steps}, and a fragment would be sent again before its "
                "means are applied; choose a shorter delay, or more local steps"
            )
        if self.moves_in_backward and (fragments > 1 or delay or blend):
            raise ValueError(
                "overlap=True, which averages the whole model during backward, cannot be combined with fragments, "
                "delay and blend; pass overlap=False"
            )


def _require_scales(algorithms: Mapping[str, Algorithm]) -> None:
    """Refuse methods whose results have another scale than updates, and warn of noise that is many times larger."""
    for one in algorithms.values():
        if not one.keeps_scale:
            raise ValueError(
                f'{one} returns signs, which under "updates" no learning rate makes small: every parameter would move '
                'by about 1 each time; pass synchronize="gradients", or take Marsit, which scales its signs'
            )
    noisy = next((one for one in algorithms.values() if isinstance(one, SSDM)), None)
    if noisy is not None:
        warn_caller(
            f'{noisy} under "updates": with n elements and M ranks the error of a result is about sqrt(n / M) times as '
            "long as the update, and models diverge where the optimizer's rate is not that much lower; Marsit and "
            "EFSignSGD have no such error",
            UserWarning,
        )


def skips_nonfinite(algorithms: Mapping[str, Algorithm]) -> bool:
    """Return True if a method skips steps with NaN or infinity."""
    return any(getattr(one, "nonfinite", None) == "skip" for one in algorithms.values())
