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


def agreed(
    call: str,
    work: Callable[[], _Entry],
    describe: Callable[[_Entry], str] = lambda _: "",
    kinds: tuple[type[Exception], ...] = (ValueError,),
) -> _Entry:
    """Return the result of a function, or raise an error on all ranks; collective.

    Raises
    ------
    Exception
        One of these `kinds`, which the function has raised on this rank.
    CollectiveMismatch
        Another rank has raised one, which the text quotes, or the ranks differ in the texts that `describe` returns.
    """
    problem, result, own = None, None, ""
    try:
        result = work()
        own = describe(result)
    except kinds as error:
        problem = error
    entries = gather((None if problem is None else str(problem), own))
    if problem is not None:
        raise reword(problem, f"{here()}, {call}: {problem}")
    for rank, (text, other) in enumerate(entries):
        if text is not None:
            raise CollectiveMismatch(f"{here()}: rank {rank} rejects {call}: {text}")
        if other != entries[0][1]:
            raise CollectiveMismatch(
                f"{here()}, {call}: ranks 0 and {rank} differ in their arguments: {entries[0][1]} and {other}; make "
                "the same call on all ranks"
            )
    return cast(_Entry, result)


def here() -> str:
    """Return the name of this rank, for messages."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"
