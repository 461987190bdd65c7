"""Options of a DistributedOptimizer, their checks, and the synchronizer that they select."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral

import torch

from collectives import Communicator
from mpicomp.algorithms import SSDM, Algorithm
from mpicomp.torch.bucket_queue import overlap_by_thread
from mpicomp.torch.bucket_reducers import BucketReducers
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.front_ends import require_bucket_size
from mpicomp.torch.optimizer.gradient_averaging import GradientAveraging
from mpicomp.torch.optimizer.local_updates import LocalUpdates
from mpicomp.torch.optimizer.step_agreement import open_agreement
from mpicomp.torch.optimizer.synchronizer import Synchronizer, SynchronizerParts
from mpicomp.torch.parameters import SIXTEEN_BIT, MasterWeights, Parameters


@dataclass(frozen=True)
class Options:
    """Options of a DistributedOptimizer, in its names; the ranks compare them as text."""

    synchronize: str
    local_steps: int
    bucket_mb: float
    overlap: bool
    backward_passes_per_step: int

    def __str__(self) -> str:
        return (
            f"DistributedOptimizer(synchronize={self.synchronize!r}, local_steps={self.local_steps}, "
            f"bucket_mb={self.bucket_mb:g}, overlap={self.overlap}, "
            f"backward_passes_per_step={self.backward_passes_per_step})"
        )

    @property
    def moves_in_backward(self) -> bool:
        """Flag: the optimizer moves parameters during backward."""
        return self.overlap and self.synchronize == "updates"

    def check(self, members: Iterable[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
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
        require_bucket_size(self.bucket_mb)
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap is {self.overlap!r}; choose True, False or None")
        if mode == "updates":
            _require_scales(algorithms)
        if not self.moves_in_backward:
            return
        cure = 'under "updates"; pass overlap=False'
        for member in members:
            if member.parameter.dtype in SIXTEEN_BIT:
                raise ValueError(
                    f"{member.name!r} is of {member.parameter.dtype}, which cannot be combined with overlap {cure}"
                )
        if _skips_nonfinite(algorithms):
            raise ValueError(f"nonfinite='skip' cannot be combined with overlap {cure}")


def open_synchronizer(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    algorithms: Mapping[str, Algorithm],
    comm: Communicator,
    options: Options,
) -> Synchronizer:
    """Return the object that averages the trained parameters of an optimizer, by these algorithms. Collective.

    Raises the errors of `open_agreement`.
    """
    members, averages_gradients = parameters.trained, options.synchronize == "gradients"
    agreement = open_agreement(optimizer, comm, members, str(options), all_options=averages_gradients)
    overlap, passes = options.overlap, options.backward_passes_per_step
    # of a model on a device backward calls hooks in a thread of its own, and calls need one thread
    on_device = any(member.parameter.device.type != "cpu" for member in members)
    if overlap and (comm.size > 1 or on_device):
        overlap = overlap_by_thread(comm, on_device) or not on_device
    masters = None if averages_gradients else MasterWeights(optimizer)
    if masters is not None:
        agreement.members = masters.substitute(members)
    parameters.hold(optimizer)
    reducers = BucketReducers(agreement.members, algorithms, comm, options.bucket_mb, one_by_one=not overlap)
    parts = SynchronizerParts(optimizer, reducers, comm, agreement, parameters, overlap, passes)
    if masters is None:
        return GradientAveraging(parts)
    return LocalUpdates(parts, masters, options.local_steps, _skips_nonfinite(algorithms))


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
        warnings.warn(
            f'{noisy} under "updates": with n elements and M ranks the error of a result is about sqrt(n / M) times as '
            "long as the update, and models diverge where the optimizer's rate is not that much lower; Marsit and "
            "EFSignSGD have no such error",
            stacklevel=4,
        )


def _skips_nonfinite(algorithms: Mapping[str, Algorithm]) -> bool:
    return any(getattr(one, "nonfinite", None) == "skip" for one in algorithms.values())
