"""Values and names as error messages quote them: short, on one line, and with a suggestion for a misspelt name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_MOST_LISTED = 300  # characters


def shown(value: object) -> str:
    """Return a value as messages quote it: of limited length, on one line, in ASCII."""
    try:
        return one_line(_SHORT.repr(value))
    except ValueError:  # Python prints no integer of thousands of digits
        return f"a large {type(value).__name__}"


def listed(keys: Iterable[object]) -> str:
    """Return the keys of an object as messages list them, in order."""
    text = ", ".join(sorted(one_line(key) for key in keys))
    return text if len(text) <= _MOST_LISTED else f"{text[:_MOST_LISTED]}..."


def list_ranks(ranks: list[int]) -> str:
    """Return "ranks 0-2, 5" for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s'[: len(ranks) > 1]} {listed}"


def one_line(error: object) -> str:
    """Return the text of an error or a path on one line that can be printed and sent to other ranks."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(str(error).split()))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to a misspelt one; empty if none is similar."""
    from difflib import get_close_matches  # takes a while to load

    by_plain_name = {_plain(one): one for one in known}
    found = get_close_matches(_plain(name), by_plain_name, 1)
    return by_plain_name[found[0]] if found else ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'ring'?)"`` for a message, or an empty text."""
    found = nearest(name, known)
    return f" (did you mean {found!r}?)" if found else ""


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
