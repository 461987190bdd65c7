"""JSON texts that are like one that we wrote, but are not: of other types, sizes and depths, damaged, or no JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

HUGE = "1" + "0" * 400
# What takes the place of a value; texts, as Python cannot write some of them.
HOSTILE = (
    "null",
    "true",
    "0",
    "-1",
    "2.5",
    "1e308",
    "-1e308",
    "1e400",
    "NaN",
    "-Infinity",
    "10000000000000000000",
    "999999999999999999",
    HUGE,
    '"text"',
    '""',
    r'"\ud800"',
    r'"\u0000\n\u2028"',
    "[]",
    "{}",
    "[[]]",
    '{"a": 1, "a": 2}',
    "[" * 100_000 + "]" * 100_000,
    "[" * 3000,
)


def mutants(value: Any, count: int, seed: int = 0) -> Iterator[str]:
    """Yield `count` texts, each with a fault; the same for the same arguments."""
    draw = random.Random(seed)
    text = json.dumps(value)
    places = list(_places(value))
    for _ in range(count):
        match draw.randrange(8):
            case 0:
                yield text[: draw.randrange(len(text))]
            case 1:
                at = draw.randrange(len(text))
                yield text[:at] + chr(draw.randrange(32, 127)) + text[at + 1 :]
            case 2:
                at, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
                yield text[:at] + text[at:end] * 2 + text[end:]
            case 3 if places:
                changed = copy.deepcopy(value)
                where = _inside(changed, draw.choice(places)[:-1])
                if isinstance(where, dict):
                    del where[draw.choice(list(where))]
                else:
                    del where[draw.randrange(len(where))]
                yield json.dumps(changed)
            case _:
                place = draw.choice([(), *places])
                hostile = draw.choice(HOSTILE)
                if not place:
                    yield hostile
                    continue
                changed = copy.deepcopy(value)
                _inside(changed, place[:-1])[place[-1]] = "@hostile@"
                yield json.dumps(changed).replace('"@hostile@"', hostile)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*at, key)
        yield from _places(one, (*at, key))


def _inside(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value
