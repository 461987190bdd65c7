"""Agreement of all ranks of a job on the arguments of a call, so that all raise an error or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from torch import distributed as dist

from collectives.errors import CollectiveMismatch, reword

_Entry = TypeVar("_Entry")


def require_process_group(call: str) -> None:
    """Raise ValueError unless there is a default process group."""
    if not dist.is_initialized():
        raise ValueError(
            f"{call}: torch.distributed has no process group; call torch.distributed.init_process_group() first"
        )


def gather(entry: _Entry) -> list[_Entry]:
    """Return the entries of all ranks of the default process group, in rank order; collective."""
    entries: list[_Entry] = [entry] * dist.get_world_size()
    dist.all_gather_object(entries, entry)
    return entries


def agree(problem: Exception | None, call: str, arguments: str = "") -> None:
    """Raise an error on all ranks if one of them has a problem, or if their `arguments`, as text, differ; collective.

    The rank with the problem raises its own error, and the others a CollectiveMismatch that quotes it.
    """
    entries = gather((None if problem is None else str(problem), arguments))
    if problem is not None:
        raise reword(problem, f"{here()}, {call}: {problem}")
    for rank, (text, own) in enumerate(entries):
        if text is not None:
            raise CollectiveMismatch(f"{here()}: rank {rank} rejects {call}: {text}")
        if own != entries[0][1]:
            raise CollectiveMismatch(
                f"{here()}, {call}: ranks 0 and {rank} differ in their arguments: {entries[0][1]} and {own}; make the "
                "same call on all ranks"
            )


def agreed(call: str, work: Callable[[], _Entry]) -> _Entry:
    """Return the result of a function; if it raises ValueError on a rank, raise an error on all; collective."""
    problem, result = None, None
    try:
        result = work()
    except ValueError as error:
        problem = error
    agree(problem, call)
    return cast(_Entry, result)


def here() -> str:
    """Return the name of this rank, for messages."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"
