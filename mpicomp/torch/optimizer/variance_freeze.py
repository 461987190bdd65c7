"""When 1-bit Adam freezes the second moment: after a number of steps, or once it has become stable.

    frozen after step t if   ||v_t||_1 >= 0.96 ||v_(t - d)||_1,   d = 1 / (1 - beta2)

v is taken with its bias correction: without it v would always grow at first. Steps before the last one
whose learning rate was higher than that of the step before it do not count, so a warm-up of the learning rate ends
first.

Reference: Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
ICML 2021.
"""

from __future__ import annotations

from typing import Literal

import torch

from mpicomp.torch.optimizer.adam_moments import Groups
from mpicomp.torch.state.schema import FREEZE_RULE, State

STABLE = 0.96


class VarianceFreeze:
    """Decides when v is frozen, from values that are equal on all ranks, so that the decision is too.

    That is after `warmup_steps`, at least 1 (else ValueError), or with "auto" once v is stable.
    """

    def __init__(self, warmup_steps: int | Literal["auto"]) -> None:
        if warmup_steps != "auto" and not (isinstance(warmup_steps, int) and warmup_steps >= 1):
            raise ValueError(f'warmup_steps is {warmup_steps!r}; it is "auto" or at least 1, since v is made in them')
        self._warmup_steps = warmup_steps
        self._norms: list[float] = []
        self._rates: list[float] = []

    @property
    def watches(self) -> bool:
        """Flag: `note` has to be called after every step."""
        return self._warmup_steps == "auto"

    def note(self, norm: float, groups: Groups) -> None:
        """Note v's norm after a step, and the learning rates of that step."""
        rates = [float(group["lr"]) for group in groups]
        if any(now > before for now, before in zip(rates, self._rates, strict=False)):
            self._norms.clear()
        self._rates = rates
        window = _window(groups)
        self._norms = [*self._norms[-window:], norm]

    def due(self, steps: int, groups: Groups) -> bool:
        """Return True if v, as it is after so many steps, has to be frozen."""
        if self._warmup_steps != "auto":
            return steps >= self._warmup_steps
        norms, window = self._norms, _window(groups)
        return len(norms) > window and norms[-1] > 0 and norms[-1] >= STABLE * norms[-1 - window]

    def state_dict(self) -> State:
        """Return the noted norms and learning rates."""
        return {"norms": torch.tensor(self._norms, dtype=torch.float64), "rates": list(self._rates)}

    def check_state_dict(self, state: State) -> None:
        """Raise ValueError unless `load_state_dict` can take `state`."""
        rates = FREEZE_RULE.check(state)["rates"]
        norms = state.get("norms")
        numbers = torch.is_tensor(norms) and norms.ndim == 1 and norms.is_floating_point()
        if not numbers or not all(isinstance(rate, float) for rate in rates):
            raise ValueError(
                "the state is damaged (norms of v, or learning rates, are no numbers); load an earlier one"
            )

    def load_state_dict(self, state: State) -> None:
        """Restore a state of `state_dict`."""
        self._norms, self._rates = state["norms"].tolist(), list(state["rates"])


def _window(groups: Groups) -> int:
    """Steps over which the slowest group's v forgets."""
    return round(1 / (1 - max(float(group["betas"][1]) for group in groups)))
