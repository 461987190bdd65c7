"""What a misspelt name may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like this one; empty if none is."""
    from difflib import get_close_matches  # takes a while to load

    by_plain_name = {_plain(one): one for one in known}
    found = get_close_matches(_plain(name), by_plain_name, 1)
    return by_plain_name[found[0]] if found else ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'ring'?)"``, or nothing: to be put into a message."""
    found = nearest(name, known)
    return f" (did you mean {found!r}?)" if found else ""


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
