"""Verdict on a job whose ranks died: its steps are those of all ranks or of the survivors, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from apps.chaos.case import Case
from apps.chaos.job import Ended
from apps.chaos.reference import Group, Reference, Step, groups_between
from apps.faults import Fault, Kind
from apps.faults.fault import KILLS

LOSS_BAND, LEAST_LENGTH = 0.1, 1000  # of the loss at the beginning, which is 1; that of a few elements is noise
# not EFSignSGD: it subtracts its signs from the residual at the beginning of the next step
BALANCED = ("local-top-k", "true-top-k", "one-bit-sgd")
"""Methods of which the residuals' sum after a step is that before, plus the vectors, less the results."""
ROUNDING = 1e-4


@dataclass(frozen=True)
class Kill:
    """A kill that the survivors have noticed."""

    fault: Fault
    seconds: float  # from the kill to the end of the survivors' first step, on the last of them
    repeated: int  # steps that the survivors made again
    lost: float  # part of the residuals' magnitude that died with the rank; 0 where a method keeps no residual


@dataclass(frozen=True)
class Verdict:
    """Verdict on a case."""

    case: Case
    problem: str  # "start", "hang", "error", "wrong" or empty
    text: str  # reason
    kills: tuple[Kill, ...]
    faults: tuple[Fault, ...] = ()  # that have happened, of all ranks


class Wrong(Exception):
    """A result that no group of ranks can have."""


def judge(case: Case, ended: Ended) -> Verdict:
    """Return the verdict on a job."""
    if not any(ended.rows.values()):
        return Verdict(case, "start", f"status {ended.status}: no rank has started\n{ended.output}", ())
    if ended.status is None:
        last = {rank: rows[-1] for rank, rows in ended.rows.items() if rows}
        return Verdict(case, "hang", f"{last}\n{ended.output}", ())
    survivors = [rank for rank in range(case.ranks) if rank not in case.killed]
    if ended.status != 0:
        return Verdict(case, "error", f"status {ended.status}\n{ended.output}", ())
    steps = {rank: [row for row in rows if row["kind"] == "step"] for rank, rows in ended.rows.items()}
    faults = tuple(Fault.parse(row["fault"]) for row in _of_kind(ended, "fault"))
    groups: list[Group] = []
    try:
        require_equal_replicas(steps)
        if case.saves:
            require_states(ended)
        if any(fault.kind is Kind.CORRUPT for fault in faults):
            require_damage(case, ended, steps)
        else:
            if any(len(steps.get(rank, ())) != case.steps for rank in survivors):
                made = {rank: len(rows) for rank, rows in steps.items()}
                raise Wrong(f"not all survivors made {case.steps} steps: {made}")
            groups = require_reference(case, steps, survivors)
            if case.method in BALANCED:
                require_balance(steps, groups)
            if case.n >= LEAST_LENGTH:
                require_loss(case, steps[survivors[0]][-1]["loss"])
    except Wrong as wrong:
        return Verdict(case, "wrong", str(wrong), (), faults)
    return Verdict(case, "", "", tuple(_kills(case, ended, steps, survivors, groups)) if groups else (), faults)


Rows = dict[int, list[dict[str, Any]]]


def require_equal_replicas(steps: Rows) -> None:
    """Raise Wrong unless all ranks that made a step, dead ones included, have the same model after it."""
    for step, rows in _by_step(steps):
        if len({row["digest"] for row in rows.values()}) > 1:
            raise Wrong(f"step {step}: replicas differ: { {rank: row['digest'] for rank, row in rows.items()} }")


def require_states(ended: Ended) -> None:
    """Raise Wrong unless each rank's state on the disk is the last one that it wrote as a whole."""
    for rank, rows in ended.rows.items():
        digests = {row["step"]: str(row["digest"]) for row in rows if row["kind"] == "step"}
        saved = [digests[row["step"]] for row in rows if row["kind"] == "save" and not row["error"]]
        attempts = [row["step"] for row in rows if row["kind"] == "save"]
        allowed = {saved[-1] if saved else ""}
        # a rank may die, or meet a damaged message, between the state and its line
        if digests and max(digests) not in attempts:
            allowed.add(digests[max(digests)])
        if ended.states.get(rank, "") not in allowed:
            raise Wrong(f"rank {rank}: the state on the disk is {ended.states.get(rank)!r}, and not of {allowed}")


def require_damage(case: Case, ended: Ended, steps: Rows) -> None:
    """Raise Wrong unless all ranks have raised DamagedMessage, and no step before has used damaged bytes."""
    silent = [rank for rank in range(case.ranks) if not any(row["kind"] == "damaged" for row in ended.rows[rank])]
    if silent:
        raise Wrong(f"ranks {silent} have not raised DamagedMessage\n{ended.output}")
    made = Reference(case).steps(tuple(range(case.ranks)), 0, case.steps)
    for step, rows in _by_step(steps):
        if any(row["digest"] != made[step].digest for row in rows.values()):
            raise Wrong(f"step {step}: the model is that of damaged bytes")


def require_reference(case: Case, steps: Rows, survivors: list[int]) -> list[Group]:
    """Raise Wrong unless the reference makes the same steps; returns the group of ranks that made each."""
    mine = steps[survivors[0]]
    members = [tuple(range(case.ranks)), *(tuple(row["members"]) for row in mine)]
    if not set(survivors) <= set(members[-1]):
        raise Wrong(f"the survivors {survivors} have become {members[-1]}")
    spans, first = list[tuple[int, int]](), 0
    while first < case.steps:
        last = first + 1
        while members[last - 1] == members[last] and last < case.steps and members[last] == members[last + 1]:
            last += 1
        spans.append((first, last))
        first = last
    reference, furthest = Reference(case), 0

    def search(number: int) -> list[Group] | None:
        """Return the groups from this span on. Several may make one model, and later steps tell them apart."""
        nonlocal furthest
        if number == len(spans):
            return []
        furthest, start, (first, last) = max(furthest, number), reference.place, spans[number]
        # a generator: the reference notices owners of errors in the first try
        tries = (
            (group, path)
            for group in groups_between(members[first], members[last])
            for path in reference.paths(group, start)
        )
        for group, path in tries:
            reference.place = start
            made = reference.steps(group, first, last, path)
            if all(_agrees(step, steps, first + at) for at, step in enumerate(made)):
                reference.accept()
                later = search(number + 1)
                if later is not None:
                    return [*[group] * (last - first), *later]
        return None

    groups = search(0)
    if groups is None:
        first, last = spans[furthest]
        between = f"no group between {members[first]} and {members[last]}"
        raise Wrong(f"steps {first} to {last - 1}: {between} makes this model")
    for step, (before, after) in enumerate(pairwise(members)):
        allowed = {float(sum(1 + rank for rank in group)) for group in groups_between(before, after)}
        for rank, rows in steps.items():
            if step < len(rows) and not set(rows[step]["sums"]) <= allowed:
                raise Wrong(f"step {step}, rank {rank}: a sum is one of {rows[step]['sums']}, not of {sorted(allowed)}")
    return groups


def _agrees(made: Step, steps: Rows, number: int) -> bool:
    rows = {rank: rows[number] for rank, rows in steps.items() if number < len(rows)}
    if any(row["digest"] != made.digest for row in rows.values()):
        return False
    # a rank that has regrouped before it wrote its line may have other errors by then, such as those of dead owners
    same = {rank: row for rank, row in rows.items() if set(row["members"]) == set(made.residuals)}
    return all(row["residual"] == made.residuals[rank] for rank, row in same.items() if rank in made.residuals)


def require_balance(steps: Rows, groups: list[Group]) -> None:
    """Raise Wrong unless each step moves the residuals' sum by the vectors less the results."""
    for step, rows in _by_step(steps):
        group = groups[step]
        if not set(group) <= set(rows):
            continue  # a rank of this step died before it wrote its residual
        before = sum(steps[rank][step - 1]["projections"][2] for rank in group) if step else 0.0
        vectors = sum(rows[rank]["projections"][0] for rank in group)
        results = sum(rows[rank]["projections"][1] for rank in group)
        after = sum(rows[rank]["projections"][2] for rank in group)
        size = 1 + sum(rows[rank]["residual"] for rank in group)
        if abs(before + vectors - results - after) > ROUNDING * size:
            raise Wrong(f"step {step}: residuals {after}, not {before} + {vectors} - {results}")


def require_loss(case: Case, loss: float) -> None:
    """Raise Wrong if the loss is worse than that of the undisturbed training; fewer ranks may have a better one."""
    undisturbed = Reference(case).steps(tuple(range(case.ranks)), 0, case.steps)[-1].loss
    # a training of many steps may diverge undisturbed, too: above the loss of 1 at the beginning there is no band
    if undisturbed <= 1 and not loss <= undisturbed + LOSS_BAND:
        raise Wrong(f"the loss is {loss:.4f}, that of the undisturbed training {undisturbed:.4f}")


def _of_kind(ended: Ended, kind: str) -> Iterator[dict[str, Any]]:
    for rows in ended.rows.values():
        yield from (row for row in rows if row["kind"] == kind)


def _by_step(steps: Rows) -> Iterator[tuple[int, dict[int, dict[str, Any]]]]:
    for step in range(max(map(len, steps.values()), default=0)):
        yield step, {rank: rows[step] for rank, rows in steps.items() if step < len(rows)}


def _kills(case: Case, ended: Ended, steps: Rows, survivors: list[int], groups: list[Group]) -> Iterator[Kill]:
    for rank in case.killed:
        rows = [row for row in ended.rows[rank] if row["kind"] == "fault" and Fault.parse(row["fault"]).kind in KILLS]
        if not rows:
            continue  # its job ended before
        row = rows[-1]
        first = {
            one: next((made for made in steps[one] if made["time"] > row["time"] and rank not in made["members"]), None)
            for one in survivors
        }
        times = [made["time"] for made in first.values() if made is not None]
        if len(times) < len(survivors):
            continue  # the rank died behind the last step
        step = next(iter(first.values()))["step"]  # type: ignore[index]
        before = [steps[one][: row["step"]] for one in groups[step] if one != rank]  # without lines of others that die
        others = sum(rows[-1]["residual"] for rows in before if rows)
        whole = others + row["residual"]
        yield Kill(
            Fault.parse(row["fault"]), max(times) - row["time"], int(rank not in groups[step]),
            row["residual"] / whole if whole else 0.0,
        )  # fmt: skip
