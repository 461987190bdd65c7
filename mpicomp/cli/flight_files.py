"""Files of the flight recorder, one of each rank of a job, as ``mpicomp analyze`` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from collectives.json_file import fields, read_json
from collectives.quoting import list_ranks, one_line

FORMAT = 1
MOST_BYTES = 1 << 26
MOST_RANKS = 1 << 20
LIBRARY = ("/collectives/", "/mpicomp/")

Content: TypeAlias = dict[str, Any]


@dataclass
class RankCall:
    """A call in the file of a rank; times are seconds since the epoch, 0 for an event that has not come."""

    number: int
    text: str
    step: int
    begun: float
    compared: float
    ended: float
    has_failed: bool
    waits_for: str

    @property
    def name(self) -> str:
        """Description with the step."""
        return f"{self.text}, step {self.step}" if self.step >= 0 else self.text


@dataclass
class RankFile:
    """File of one rank, with its collective calls."""

    rank: int
    ranks: int
    reason: str
    written: float
    unanswered: list[int]
    stacks: list[tuple[str, list[str]]]
    calls: dict[str, dict[int, RankCall]] = field(default_factory=dict)  # by communicator and number
    begun: dict[str, int] = field(default_factory=dict)  # number of calls by communicator
    members: dict[str, list[int]] = field(default_factory=dict)  # ranks of the communicators
    in_flight: list[float] = field(default_factory=list)  # beginnings of calls that have not ended, pairwise ones too

    @property
    def has_failed(self) -> bool:
        """True if an error wrote the file, and no signal."""
        return not self.reason.startswith("SIG")

    @property
    def is_waiting(self) -> bool:
        """True if calls are in flight, and a thread is in this library: the rank does not compute meanwhile."""
        inside = any(part in line for _, stack in self.stacks for line in stack for part in LIBRARY)
        return inside and bool(self.in_flight)

    def waiting(self, key: str) -> list[RankCall]:
        """Return the calls of a communicator that have not ended, in order."""
        return [call for call in self.calls.get(key, {}).values() if not call.ended]


def read(folder: Path) -> tuple[list[RankFile], list[str]]:
    """Return the newest run's files in rank order, and notes about others; ValueError if none can be read."""
    if not folder.is_dir():
        raise ValueError(f"{one_line(folder)} is no folder; name the one that the error or MPICOMP_FLIGHT_DIR names")
    found: list[RankFile] = []
    notes: list[str] = []
    for path in sorted(folder.glob("flight-*.json")):
        try:
            if not path.is_file():
                raise ValueError(f"{one_line(path.name)} is no regular file")
            found.append(rank_file(path))
        except (OSError, ValueError) as error:
            notes.append(f"left out: {one_line(error)}")
    if not found:
        problems = f" ({'; '.join(notes)})" if notes else ""
        raise ValueError(
            f"no rank has left a file flight-RANK.json that can be read in {one_line(folder)}{problems}; name the "
            "folder that the error or MPICOMP_FLIGHT_DIR names"
        )
    newest = max(found, key=lambda one: one.written)
    keys, grows = set(newest.members), True
    while grows:  # files of one run have communicators in common
        joined = keys.union(*(one.members for one in found if keys & set(one.members)))
        grows, keys = joined != keys, joined
    kept = [one for one in found if one is newest or keys & set(one.members)]
    kept += [one for one in found if not keys and one not in kept and not one.members]
    left = sorted(one.rank for one in found if one not in kept)
    if left:
        notes.append(f"left out: the file{'s'[: len(left) > 1]} of {list_ranks(left)}, of another run")
    return sorted(kept, key=lambda one: one.rank), notes


def rank_file(path: Path) -> RankFile:
    """Read a file; OSError or ValueError if it cannot be read or is not the flight recorder's."""
    cure = "remove it"
    content = read_json(path, cure, most_bytes=MOST_BYTES)
    try:
        fields(
            content, format=int, reason=str, rank=int, ranks=int, clock=dict, missing=list, communicators=list,
            texts=list, calls=list, threads=list,
        )  # fmt: skip
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, and this version reads {FORMAT}")
        if not 0 <= content["rank"] < content["ranks"] <= MOST_RANKS or path.name != f"flight-{content['rank']}.json":
            raise ValueError(f"its rank is {content['rank']} of {content['ranks']}")
        return _rank_file(content)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{one_line(path)} is not a file of the flight recorder ({one_line(error)}); {cure}"
        ) from error


def _rank_file(content: Content) -> RankFile:
    clock = fields(content["clock"], monotonic=float, wall=float)
    offset = clock["wall"] - clock["monotonic"]
    stacks = [fields(one, name=str, stack=list) for one in content["threads"]]
    made = RankFile(
        content["rank"],
        content["ranks"],
        one_line(content["reason"]),
        clock["wall"],
        _ranks(content["missing"], content["ranks"]),
        [(one_line(one["name"]), [one_line(line) for line in one["stack"]]) for one in stacks],
    )
    keys = []
    for one in content["communicators"]:
        fields(one, key=str, begun=int, members=list)
        keys.append(one["key"])
        made.begun[one["key"]] = one["begun"]
        made.members[one["key"]] = _ranks(one["members"], content["ranks"])
    for one in content["calls"]:
        fields(one, communicator=int, call=int, text=int, step=int, begun=float, compared=float, ended=float)
        if not one["ended"]:
            made.in_flight.append(one["begun"] + offset)
        if one["call"] < 1:  # of two ranks, which has no place in the order
            continue
        if not 0 <= one["communicator"] < len(keys):
            raise ValueError(f"it has no communicator {one['communicator']}")
        begun, compared, ended = (one[name] + offset if one[name] else 0.0 for name in ("begun", "compared", "ended"))
        described, waits_for = one_line(content["texts"][one["text"]]), one_line(one.get("waits_for", ""))
        call = RankCall(one["call"], described, one["step"], begun, compared, ended, "error" in one, waits_for)
        made.calls.setdefault(keys[one["communicator"]], {})[call.number] = call
    return made


def _ranks(found: list[Any], size: int) -> list[int]:
    if not all(type(one) is int and 0 <= one < size for one in found):
        raise ValueError("it names ranks that are no ranks of its job")
    return found
