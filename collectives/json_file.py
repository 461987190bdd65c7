"""JSON that this program may not have written: read within limits, and rejected by an error of one line.

Python's own reader takes texts of any size and depth, integers of any length, and objects that have a key twice. Texts
that are damaged, or of another program, then fail far from where they were read, with errors of many kinds, and on one
rank alone. `read_json` raises `ValueError` for all of these, and `fields` does so for objects of another form.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from collectives.quoting import one_line, shown
from collectives.regular_file import open_regular

MOST_BYTES = 1 << 24
MOST_DEPTH = 100
MOST_DIGITS = 18  # any integer of 18 digits fits into 64 bits

_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # an unterminated one reaches to the end of the text
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BRACKETS = bytes.maketrans(b"[]", b"{}")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}


def read_json(path: str | Path, cure: str, *, most_bytes: int = MOST_BYTES) -> Any:
    """Read a JSON file of `most_bytes` at most.

    `cure` ends the message of an error, as in "write it with mpicomp advise --save".

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file is no JSON within the limits of `parse_json`; one line with the file, the cause and the cure.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    try:
        if len(content) > most_bytes:
            raise ValueError(f"the file is longer than {most_bytes} bytes")
        return parse_json(content.decode())
    except ValueError as error:
        raise ValueError(f"{one_line(path)} is not JSON that can be read ({one_line(error)}); {cure}") from error


def parse_json(
    text: str, *, most_depth: int = MOST_DEPTH, most_digits: int = MOST_DIGITS, surrogates: bool = False
) -> Any:
    """Read one JSON text; NaN and Infinity are numbers, as Python writes them.

    Halves of surrogate pairs, which cannot be printed or sent to other ranks, are accepted with `surrogates`.

    Raises
    ------
    ValueError
        The text is not JSON; or it is nested deeper, or has an integer of more digits, than it may; or it has a number
        beyond float64, or an object with a key twice. One line.
    """
    _check_depth(text, most_depth)

    def integer(digits: str) -> int:
        if len(digits.lstrip("-")) > most_digits:
            raise ValueError(f"an integer has {len(digits)} characters, more than {most_digits} digits")
        return int(digits)

    try:
        found = json.loads(text, object_pairs_hook=_object, parse_int=integer, parse_float=_number)
    except RecursionError as error:  # the caller has used up most of the stack
        raise ValueError("the text is nested too deep") from error
    if not surrogates and _SURROGATE.search(text):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text has half of a surrogate pair") from error
    return found


def fields(found: Any, **types: type | Sequence[type]) -> dict[str, Any]:
    """Return `found` if it is an object that has these keys with values of these types; it may have others.

    `types` has for each key bool, int, float, str, list, dict or NoneType, or several of them. A float may be an
    integer, but not true or false.

    Raises
    ------
    ValueError
        Something is missing or of another type; names the key.
    """
    if not isinstance(found, dict):
        raise ValueError(f"it is {shown(found)}, not an object")
    for key, expected in types.items():
        several = (expected,) if isinstance(expected, type) else tuple(expected)
        if key not in found:
            raise ValueError(f"it has no {key!r}")
        if type(found[key]) not in (*several, *((int,) if float in several else ())):
            wanted = " or ".join(_NAMES.get(one, "null") for one in several)
            raise ValueError(f"its {key!r} is {shown(found[key])}, not {wanted}")
    return found


def _check_depth(text: str, most: int) -> None:
    marks = _STRING.sub("", text).encode(errors="replace").translate(_BRACKETS, _OTHERS)
    turns = np.frombuffer(marks, np.int8)
    depths = np.cumsum(np.where(turns == ord("{"), np.int8(1), np.int8(-1)), dtype=np.int32)
    if depths.size and depths.max() > most:
        raise ValueError(f"the text is nested deeper than {most} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} occurs more than once in an object")
    return made


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {shown(digits)} is beyond the range of float64")
    return value
