"""State of a choice: the state of the method that compresses, and the plan of trials."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.annotations import AnyArray
from mpicomp.aggregator.parts import Feedback, State, StateKind
from mpicomp.auto.chosen import Chosen
from mpicomp.auto.trials import Plan

KEY = "auto"  # key of the plan in a state, next to the method's entries


class ChosenFeedback:
    """Feedback of the method, with the plan in its states. Other attributes are those of the method's feedback."""

    def __init__(self, inner: Feedback | None, reducer: Chosen) -> None:
        self._inner, self._reducer = inner, reducer
        kinds: dict[str, StateKind] = {} if inner is None else inner.state_kinds
        self.state_kinds: dict[str, StateKind] = {**kinds, KEY: "shared"}
        self.state_nan = "" if inner is None else inner.state_nan
        if inner is not None:
            self.check_ready = inner.check_ready  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_inner"), name)

    @property
    def residual(self) -> AnyArray | None:
        """Residual of the method, if it has one."""
        return None if self._inner is None else self._inner.residual

    def check_ready(self) -> None:
        """Do nothing: a method without feedback is always ready."""

    def state(self) -> State:
        """Return the method's state; entry "auto" has the plan, the number of ranks, and a flag for pending errors."""
        one = self._reducer
        plan = np.array([*one.plan.numbers(), one.ranks, one.compressed], np.float64)
        return {**({} if self._inner is None else self._inner.state()), KEY: plan}

    def like(self) -> State:
        """Return an array with the expected shape and type for each entry that a state must have."""
        return {**({} if self._inner is None else self._inner.like()), KEY: np.zeros(6)}

    def check_owner(self, state: dict[str, Any], where: str) -> None:
        """Raise ValueError for an invalid plan, and for entries of elements that another rank owns."""
        try:
            self._plan_of(state)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        check_owner = getattr(self._inner, "check_owner", None)
        if check_owner is not None:
            check_owner(state, where)

    def load(self, state: dict[str, Any]) -> str:
        """Take over a checked state; a plan of another number of ranks is not used."""
        compared = "" if self._inner is None else self._inner.load(state)
        plan, compressed = self._plan_of(state)
        self._reducer.load(plan, compressed)
        return f"{compared} {plan}".strip()

    def _plan_of(self, state: dict[str, Any]) -> tuple[Plan, bool]:
        step = int(state["step"])
        *numbers, ranks, compressed = np.asarray(state[KEY], np.float64).tolist()
        try:
            plan = Plan.of(numbers, step)
        except ValueError as error:
            raise ValueError(f"this state's {KEY} {error}: take an earlier one") from None
        return plan if ranks == self._reducer.ranks else self._reducer.first_plan(step), bool(compressed)
