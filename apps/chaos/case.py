"""A case: one job with its method, vectors and faults, all drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from apps.faults import Fault, Kind, Phase, fail_at, parse_schedule, random_faults, write_schedule
from apps.faults.fault import KILLS
from apps.faults.schedule import drawn
from apps.records import Record
from collectives.schedules.registry import TopologyName

LENGTHS = (7, 1000, 20_000, 50_000)
METHODS: dict[str, dict[str, object]] = {
    "dense": {},
    "marsit": {},
    "local-top-k": {"rate": 10},
    "true-top-k": {"rate": 10},
    "random-k": {"rate": 10},
    "qsgd": {},
    "terngrad": {},
    "one-bit-sgd": {},
    "ef-signsgd": {},
    "majority-vote": {},
    "double-squeeze": {},
    "scalecom": {},
}
TOPOLOGIES: tuple[TopologyName, ...] = (
    "auto",
    "ring",
    "segmented-ring",
    "tree",
    "double-tree",
    "halving-doubling",
    "star",
)
TOPOLOGY_OF: dict[str, TopologyName] = {"ef-signsgd": "auto"}
MOST_AUTO = 20_000  # elements; "auto" leaves longer exact sums to MPI, which adds in an order of its own
SIMULTANEOUS = 0.3  # part of the cases whose ranks may die in one step
CALM_STEPS = 3  # behind the last fault
DAMAGED = 0.3  # part of the cases with faults of all kinds in which a message is damaged
BURST_STEPS = 60  # of which some follow the last death; in so many random-k diverges undisturbed, by its rate
FAULTY_STEPS, STEPS_BETWEEN = 10, 1.5  # mean number of steps between two faults


@dataclass(frozen=True)
class Case:
    """A job with faults.

    Parameters
    ----------
    seed : int
        Of the vectors.
    ranks, steps, n : int
        `n` is the length of the vectors.
    method, options, topology
        As `mpicomp.algorithm` and `Communicator` take them.
    faults : tuple of Fault
    sums : int
        Sums of full precision that are in flight together with each step.
    checksums : bool
        Of messages.
    saves : bool
        Each rank writes a state after each step.
    """

    seed: int
    ranks: int
    steps: int
    n: int
    method: str
    options: dict[str, object]
    topology: TopologyName
    faults: tuple[Fault, ...] = ()
    sums: int = 0
    checksums: bool = False
    saves: bool = False

    @property
    def killed(self) -> tuple[int, ...]:
        """Ranks that die."""
        return tuple(sorted(fault.rank for fault in self.faults if fault.kind in KILLS))

    def record(self) -> Record:
        """Return the case as JSON."""
        return {**asdict(self), "faults": write_schedule(self.faults)}

    @classmethod
    def of_record(cls, record: Record) -> Case:
        """Return the case of a record."""
        return cls(**{**record, "faults": parse_schedule(record["faults"])})

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.ranks} ranks, {self.method} of {self.n} elements over {self.topology}, "
            f"{self.steps} steps, {self.sums} sums in flight, {write_schedule(self.faults)}"
        )


def case_of_kills(seed: int, most_ranks: int = 8, methods: Sequence[str] = tuple(METHODS)) -> Case:
    """Return a case whose ranks die in random phases, the same for the same arguments.

    Most cases kill many ranks, since starting a job takes longer than its steps.
    """
    draw = random.Random(seed)
    ranks = draw.randint(2, most_ranks)
    n_killed = max(draw.randint(1, ranks - 1), draw.randint(1, ranks - 1))
    last = 2 + 2 * n_killed
    is_simultaneous = draw.random() < SIMULTANEOUS
    steps = (
        [draw.randint(1, last) for _ in range(n_killed)]
        if is_simultaneous
        else draw.sample(range(1, last + 1), n_killed)
    )
    phases = [phase for phase in Phase if phase is not Phase.CHECKPOINT]
    faults = tuple(
        drawn(draw, Kind.KILL, rank, step, draw.choice(phases))
        for rank, step in zip(draw.sample(range(ranks), n_killed), sorted(steps), strict=True)
    )
    method, n, topology = draw.choice(list(methods)), draw.choice(LENGTHS), draw.choice(TOPOLOGIES)
    if topology == "auto" and n > MOST_AUTO:
        topology = "ring"
    return Case(
        seed, ranks, last + 1 + CALM_STEPS, n, method, METHODS[method],
        TOPOLOGY_OF.get(method, topology), faults, draw.choice((0, 0, 1, 3)),
    )  # fmt: skip


def case_of_bursts(seed: int, most_ranks: int = 8) -> Case:
    """Return a case whose ranks die in quick succession, most of them while the others regroup; the same for a seed.

    One rank dies in a step, and up to three others within 60 ms of it.
    """
    draw = random.Random(f"bursts of {seed}")
    ranks = draw.randint(min(4, most_ranks), most_ranks)
    first, *others = draw.sample(range(ranks), min(ranks - 1, draw.randint(2, 4)))
    late = (drawn(draw, Kind.LATE_KILL, rank, 1, Phase.BEFORE_CALL) for rank in others)
    method = draw.choice([one for one in METHODS if one != "random-k"])
    faults = (fail_at(first, 1), *late)
    return Case(seed, ranks, BURST_STEPS, 1000, method, METHODS[method], TOPOLOGY_OF.get(method, "ring"), faults)


def case_of_faults(seed: int, most_ranks: int = 8) -> Case:
    """Return a case with faults of all kinds, the same for the same arguments.

    Ranks are killed, stopped and slow, and write states on disks that are full at times. Or no rank is killed, and a
    damaged message ends the job: with checksums all ranks raise an error.
    """
    draw, case = random.Random(f"faults of {seed}"), case_of_kills(seed, most_ranks)
    is_damaged = draw.random() < DAMAGED
    kinds = [Kind.STOP, Kind.SLOW, Kind.DISK_FULL, *([] if is_damaged else [Kind.KILL])]
    faults = random_faults(draw.randrange(1 << 32), case.ranks, FAULTY_STEPS, kinds, STEPS_BETWEEN, [*Phase])
    if is_damaged:
        step, phase = draw.randrange(FAULTY_STEPS), draw.choice([*Phase])
        faults = *faults, drawn(draw, Kind.CORRUPT, draw.randrange(case.ranks), step, phase)
    return replace(case, steps=FAULTY_STEPS + CALM_STEPS, faults=faults, checksums=is_damaged, saves=True)
