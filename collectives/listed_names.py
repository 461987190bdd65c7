"""Classes that list the names that programs use, for completion at a prompt."""

from __future__ import annotations


class Listed(type):
    """Class that lists the names that programs use: Python's prompt completes with those of object and classes."""

    listed: tuple[str, ...]

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name in cls.listed or name.startswith("__")]
