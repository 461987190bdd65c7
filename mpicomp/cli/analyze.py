"""``mpicomp analyze`` reads the flight recorder's files of a job, and names the ranks for which the others wait.

``mpicomp analyze DIR --json``

It needs no MPI. The exit status is 0 if a rank is named, 1 if no rank is late or differs, and 2 if the folder has no
file that can be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from collectives.quoting import list_ranks, one_line
from mpicomp.cli.flight_files import LIBRARY, RankCall, RankFile, read

NOTHING_FOUND, USAGE_ERROR = 1, 2
LATE_S = 1.0  # lateness at which a rank is named in files that no error has written, and error of the hosts' clocks
MOST_LINES = 6  # of a stack, in the text
MOST_SHOWN = 200  # characters of a call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp analyze`` to `parser`."""
    parser.epilog = "exit status: 0 if a rank is named, 1 if no rank is late or differs, 2 without files to read"
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder with the ranks' files, flight-RANK.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the findings and return the exit status."""
    try:
        files, notes = read(args.folder)
    except (OSError, ValueError) as error:
        print(f"mpicomp analyze: error: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    report = analyze(files, notes)
    print(json.dumps(asdict(report)) if args.json else text(report))
    return 0 if report.named else NOTHING_FOUND


# Findings ------------------------------------------------------------------------------------------------------------


@dataclass
class HangFinding:
    """Ranks that keep others waiting, or whose call differs."""

    # "differs", "late" (has not begun the call), "silent" (within the call), "no file", "ahead", or "differed" in a
    # call after which the ranks went on
    kind: str
    ranks: list[int]
    communicator: list[int]  # its ranks
    call: int  # number of the call on this communicator
    name: str  # description of the call
    waiting: list[int]  # ranks that are in the call
    sentence: str
    stacks: dict[int, list[str]] = field(default_factory=dict)  # of the main thread of each rank, innermost line first


@dataclass
class Report:
    """Findings about a job, the most important one first."""

    ranks: int
    files: list[int]
    missing_files: list[int]
    reasons: dict[str, list[int]]
    named: list[int]  # ranks for which the others wait, or whose call differs
    findings: list[HangFinding]
    notes: list[str]


def analyze(files: list[RankFile], notes: list[str]) -> Report:
    """Return the late and deviating ranks that the files of a run show."""
    by_rank = {one.rank: one for one in files}
    n_ranks = max(one.ranks for one in files)
    missing = [rank for rank in range(n_ranks) if rank not in by_rank]
    # Ranks that wait to take the place of a dead one have the members' key, each with a communicator of its own.
    groups = dict.fromkeys((key, tuple(members)) for one in files for key, members in one.members.items())
    found: dict[str, list[HangFinding]] = defaultdict(list)
    for key, members in groups:
        group = _Group(key, members, [one for one in files if one.members.get(key) == list(members)])
        for one in (*group.differing(), *group.late(), *group.silent(), *group.ahead()):
            found["silent" if one.kind == "no file" else one.kind].append(one)
    differing, late, silent = found["differs"], found["late"], found["silent"]
    late_ranks = {rank for one in late for rank in one.ranks}
    # A late rank that itself waits in a call is a consequence, unless all of them wait.
    idle = {rank for rank in late_ranks if not by_rank[rank].is_waiting}
    named = sorted(_find_unanswered(files) or idle or {rank for one in silent for rank in one.ranks} or late_ranks)
    if differing:
        named = differing[0].ranks
    consequences = [*late, *silent]
    if set(named) - late_ranks or idle:
        consequences = [one for one in consequences if set(one.ranks) & set(named)]
    findings = [*differing, *consequences, *found["ahead"], *found["differed"]]
    for one in findings:
        one.stacks = {rank: _stack(by_rank[rank]) for rank in one.ranks if rank in by_rank}
    reasons: dict[str, list[int]] = {}
    for file in files:
        reasons.setdefault(file.reason, []).append(file.rank)
    if late_ranks and late_ranks == set(named) and not idle and not differing:
        notes = [*notes, "the late ranks wait in other calls: compare the order in which the ranks make their calls"]
    return Report(n_ranks, sorted(by_rank), missing, reasons, named, findings, notes)


class _Group:
    """Files of the ranks of one communicator."""

    def __init__(self, key: str, members: Sequence[int], files: list[RankFile]) -> None:
        self.key, self.members, self.files = key, list(members), files
        with_file = {one.rank for one in files}
        self.missing = [rank for rank in self.members if rank not in with_file]
        self.without = {one.rank: one for one in files}
        self.tolerance_s = 0.0 if any(one.has_failed for one in files) else LATE_S

    def differing(self) -> list[HangFinding]:
        """Return the first call in which the ranks differ, and the first one after which they went on."""
        first: dict[str, HangFinding] = {}
        for number in sorted({number for one in self.files for number in one.calls.get(self.key, {})}):
            ranks_of: dict[str, list[int]] = {}
            for one, call in self._calls(number):
                ranks_of.setdefault(call.name, []).append(one.rank)
            if len(ranks_of) > 1:
                (common, others), *rest = sorted(ranks_of.items(), key=lambda one: -len(one[1]))
                tied = [name for name, ranks in rest if len(ranks) == len(others)]
                deviating = ranks_of.values() if tied else [some for _, some in rest]
                ranks = sorted(rank for some in deviating for rank in some)
                listed = "; ".join(f"{list_ranks(some)}: {_short(name)}" for name, some in ranks_of.items())
                kind, then = ("differed", ", and the ranks went on") if self._has_passed(number) else ("differs", "")
                sentence = f"call {number} of {self._name()} {kind}{then}: {listed}"
                first.setdefault(kind, HangFinding(kind, ranks, self.members, number, common, [], sentence))
        return [*first.values()]

    def _has_passed(self, number: int) -> bool:
        """Return True if this call has ended on all ranks, and so have later ones, or a rank waits in a later one."""
        ended = [(one, call.ended) for one, call in self._calls(number)]
        waits = any(begun > end for one, end in ended for begun in one.in_flight)
        return all(end for _, end in ended) and (waits or all(self._has_ended_after(one, number) for one, _ in ended))

    def _has_ended_after(self, one: RankFile, number: int) -> bool:
        calls = one.calls[self.key].values()
        return any(call.number > number and call.ended and not call.has_failed for call in calls)

    def late(self) -> list[HangFinding]:
        """Return the ranks that had not begun a call in which others were waiting when they wrote their files."""
        found: dict[int, list[int]] = {}
        for one in self.files:
            number = one.begun[self.key] + 1
            if one.is_waiting and one.waiting(self.key):  # in an earlier call, which is the one to look at
                continue
            waiting = [call for other, call in self._calls(number) if other is not one and not call.ended]
            if any(one.written - call.begun > self.tolerance_s for call in waiting):
                found.setdefault(number, []).append(one.rank)
        findings = []
        for number, ranks in sorted(found.items()):
            waiting_ranks, call = self._waiting(number)
            seconds = max(self.without[rank].written for rank in ranks) - call.begun
            others = f"{list_ranks(waiting_ranks)} {_wait(waiting_ranks)}"
            sentence = (
                f"{list_ranks(ranks)} {_has(ranks)} not begun call {number} of {self._name()}, {_short(call.name)}, "
                f"in which {others}: {seconds:.3g} s late at the time of the file"
            )
            findings.append(HangFinding("late", ranks, self.members, number, call.name, waiting_ranks, sentence))
        return findings

    def silent(self) -> list[HangFinding]:
        """Return the ranks without an answer, or without a file, for which others wait within a call."""
        found = []
        unanswered = sorted({rank for one in self.files for rank in one.unanswered if rank in self.members})
        waiting = sorted({call.number for one in self.files for call in one.waiting(self.key)})
        if not waiting:
            return []
        number = waiting[0]
        ranks_waiting, call = self._waiting(number)
        ranks_waiting = [rank for rank in ranks_waiting if rank not in unanswered]
        in_call = f"in call {number} of {self._name()}, {_short(call.name)}"
        described = next((f" ({one})" for one in self._waits(number) if one), "")
        late = {rank for one in self.late() for rank in one.ranks}
        silent = [rank for rank in unanswered if rank not in late]
        if silent:
            sentence = (
                f"{list_ranks(silent)} did not answer while {list_ranks(ranks_waiting)} {_wait(ranks_waiting)} "
                f"{in_call}{described}: stopped, dead or busy outside of calls"
            )
            found.append(HangFinding("silent", silent, self.members, number, call.name, ranks_waiting, sentence))
        lost = [rank for rank in self.missing if rank not in unanswered]
        stalled = max(one.written for one in self.files) - call.begun > self.tolerance_s
        if lost and stalled and not silent:
            # A rank with a file is here if it has let the communicator go, or had 2,000 calls since.
            others = f"{list_ranks(ranks_waiting)} {_wait(ranks_waiting)}"
            sentence = (
                f"{list_ranks(lost)} left no record of this communicator, and {others} "
                f"{in_call}{described}: stopped, dead, or on a host whose files are elsewhere"
            )
            found.append(HangFinding("no file", lost, self.members, number, call.name, ranks_waiting, sentence))
        return found

    def ahead(self) -> list[HangFinding]:
        """Return the ranks that have ended a call that another rank had not begun long after."""
        for one in self.files:
            number = one.begun[self.key] + 1
            ranks, name = [], ""
            for other, call in self._calls(number):
                if call.ended and not call.has_failed and one.written - call.ended > LATE_S:
                    ranks.append(other.rank)
                    name = call.name
            if ranks:
                sentence = (
                    f"{list_ranks(ranks)} {_has(ranks)} ended call {number} of {self._name()}, {_short(name)}, which "
                    f"rank {one.rank} has not begun: calls are not compared (verify=False), or failed"
                )
                return [HangFinding("ahead", ranks, self.members, number, name, [], sentence)]
        return []

    def _calls(self, number: int) -> list[tuple[RankFile, RankCall]]:
        """Return the files that have the call of this number, with their record of it."""
        calls_of = [(one, one.calls.get(self.key, {})) for one in self.files]
        return [(one, calls[number]) for one, calls in calls_of if number in calls]

    def _waiting(self, number: int) -> tuple[list[int], RankCall]:
        waiting = {one.rank: call for one, call in self._calls(number) if not call.ended}
        return sorted(waiting), min(waiting.values(), key=lambda call: call.begun)

    def _waits(self, number: int) -> list[str]:
        return [call.waits_for for one in self.files for call in one.waiting(self.key) if call.number == number]

    def _name(self) -> str:
        return f"the communicator of {list_ranks(self.members)}"


def _find_unanswered(files: list[RankFile]) -> set[int]:
    """Return the ranks that answered none of the ranks that gave up; ranks that gave up themselves left other files."""
    lists = [set(one.unanswered) for one in files if one.unanswered]
    return set.intersection(*lists) if lists else set()


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _short(name: str) -> str:
    return name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]} ..."


def _stack(file: RankFile) -> list[str]:
    return file.stacks[0][1] if file.stacks else []


# Text ----------------------------------------------------------------------------------------------------------------


def text(report: Report) -> str:
    """Return the report for a reader."""
    lines = [f"{len(report.files)} of {report.ranks} ranks left a file"]
    if report.missing_files:
        lines[0] += f"; none of {list_ranks(report.missing_files)}"
    lines += [f"{list_ranks(ranks)}: {_short(reason)}" for reason, ranks in report.reasons.items()]
    if not report.findings:
        lines.append("no rank is late, and no call differs")
    for one in report.findings:
        lines += ["", one.sentence]
        for rank, stack in one.stacks.items():
            own = [line for line in stack if not any(part in line for part in LIBRARY)] or stack
            lines += [f"  rank {rank}", *(f"    {line}" for line in own[:MOST_LINES])]
    return "\n".join([*lines, *(f"# {note}" for note in report.notes)])
