"""Check of reports: the schema, and that medians belong to their times."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collectives.quoting import one_line, shown, suggestion

SCHEMA = json.loads(Path(__file__).with_name("schema.json").read_text())
PRODUCT, VERSION = (SCHEMA["$defs"][name]["pattern"] for name in ("product", "version"))
COMPRESSED = ("marsit", "relay")
AGAIN = "measure again with mpicomp bench --report"
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def problems(report: Any) -> list[str]:
    """Return a line for each problem of a report, with its cure; none if the report is valid."""
    known = SCHEMA["properties"]["schema"]["const"]
    given = report.get("schema") if isinstance(report, dict) else None
    if type(given) is int and given != known:
        return [f"schema: it is version {given}, and this mpicomp reads {known}: use the mpicomp that wrote the file"]
    return [*_violations(report, SCHEMA, "")] or [*_contradictions(report)]


def _violations(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the violations of a schema, of whose keywords those of `schema.json` are known."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] | schema
    types = schema.get("type", list(_TYPES))
    types = [types] if isinstance(types, str) else types
    if not any(_is(value, one) for one in types):
        yield f"{path or 'the file'}: {shown(value)} is not of type {' or '.join(types)}; {AGAIN}"
    elif value not in schema.get("enum", [schema.get("const", value)]) or not _fits(value, schema):
        limits = {key: schema[key] for key in ("enum", "minimum", "exclusiveMinimum", "minItems") if key in schema}
        wanted = ", ".join([*filter(None, [schema.get("description")]), *(f"{k} {v}" for k, v in limits.items())])
        yield f"{path}: {shown(value)} does not fit ({wanted}); correct it, or {AGAIN}"
    elif isinstance(value, dict):
        own = schema["properties"]
        for key in value.keys() - own.keys():
            near = suggestion(key, own)
            yield f"{_join(path, key)}: no field of a report{near}; delete it: names of hosts, users and paths stay out"
        for key in schema["required"]:
            if key not in value:
                yield f"{_join(path, key)}: missing; {AGAIN}"
            else:
                yield from _violations(value[key], own[key], _join(path, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _violations(one, schema["items"], f"{path}[{index}]")


def _is(value: Any, name: str) -> bool:
    """Return whether a value has a type of JSON; NaN and infinity have none."""
    is_number = name in ("integer", "number")
    return isinstance(value, _TYPES[name]) and not (is_number and (isinstance(value, bool) or not math.isfinite(value)))


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        return len(value) >= int(schema.get("minItems", 0))
    if isinstance(value, int | float):
        return bool(schema.get("minimum", -math.inf) <= value > schema.get("exclusiveMinimum", -math.inf))
    return True


def _join(path: str, key: str) -> str:
    return f"{path}.{one_line(key)}" if path else one_line(key)


def _contradictions(report: dict[str, Any]) -> Iterator[str]:
    """Yield contradictions between the fields of a report that fits the schema."""
    parts = [(f"allreduce[{index}]", part, part["calls"]) for index, part in enumerate(report["allreduce"])]
    for path, part, calls in [*parts, ("training", report["training"], report["training"]["steps"])]:
        if (part["skipped"] is None) != bool(calls):
            yield f"{path}: skipped is {shown(part['skipped'])}, with {len(calls)} timed calls; {AGAIN}"
        for call in calls:
            median = statistics.median(call["seconds"])
            if not math.isclose(median, call["median_s"], rel_tol=1e-5):
                yield f"{path}: median_s of {call['name']} is {call['median_s']}, of its seconds {median:.7g}; {AGAIN}"
        medians = {call["name"]: call["median_s"] for call in calls if call["name"] not in COMPRESSED}
        best = min(medians, key=lambda name: medians[name], default=None)
        if "best_dense" in part and part["best_dense"] != best:
            yield f"{path}: best_dense is {shown(part['best_dense'])}, by the medians {shown(best)}; {AGAIN}"
