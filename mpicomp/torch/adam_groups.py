"""The options of a parameter group of Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Groups = Sequence[dict[str, Any]]
GROUP_OPTIONS = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError, with the option's name, if one is out of range, and TypeError if it is no number."""
    try:
        beta1, beta2 = group["betas"]
        checks = (
            ("lr", group["lr"] >= 0, "0 or more"),
            ("betas", 0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers from 0 to below 1"),
            ("eps", group["eps"] > 0, "positive"),
            ("weight_decay", group["weight_decay"] >= 0, "0 or more"),
        )
    except (TypeError, ValueError):
        given = {name: group[name] for name in GROUP_OPTIONS}
        raise TypeError(
            f"the options {given!r:.300} are not all numbers; write OneBitAdam(params, lr=0.001, betas=(0.9, 0.999))"
        ) from None
    for name, fine, wanted in checks:
        if not fine:
            raise ValueError(f"{name} is {group[name]}; it must be {wanted}")
