"""Options of a DistributedOptimizer, and the checks that they are in range and fit each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from collectives.caller_warning import warn_caller
from mpicomp.algorithms import SSDM, Algorithm
from mpicomp.torch.front_ends import require_bucket_size
from mpicomp.torch.parameters import NARROW, NamedParameter, require_own_gradients


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
    islands: Literal["", "communicator", "process group"] = ""

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
