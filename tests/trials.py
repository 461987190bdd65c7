"""Every method in all its forms, over the topologies on which it is compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives import DoubleTree, HalvingDoubling, Ring, Star, Torus, Tree
from collectives.schedules.plan import Topology
from mpicomp import (
    ECQSGD,
    EF21,
    QSGD,
    SSDM,
    CascadingSSDM,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    LocalTopK,
    MajorityVote,
    Marsit,
    MemSGD,
    OneBitSGD,
    PowerSGD,
    RandomK,
    Relay,
    ScaleCom,
    SparseLoCo,
    TernGrad,
    TopKSGD,
    TrueTopK,
)
from mpicomp.aggregator.registration import REGISTERED
from mpicomp.codecs import OneBit, Quantizer, Ternary, TwoMeans
from tests.exact import Trial, Trials
from tests.mpi.lanes import topologies

LONG = 9 * 4096 + 11  # every one of 8 ranks has a chunk, and the last block is short
VOTES = 5 * 4096 + 75
FLOATS = ("float16", "float64")


def over(where: Sequence[Topology | None], *trials: Trial) -> list[tuple[Trial, Topology | None]]:
    """Return each trial over each of the topologies."""
    return [(trial, topology) for topology in where for trial in trials]


def dense(size: int) -> Trials:
    """Return the trials of `Dense`, whose sums over every topology are those of the all-reduce."""
    of_types = (Trial(Dense(), 1000, 2, dtype) for dtype in (*FLOATS, "bfloat16"))
    return over([Ring()], *(Trial(Dense(), n, 2) for n in (0, 1, 5003)), *of_types)


def dense_in_16_bits(size: int) -> Trials:
    """Return the trials of `Dense` with either type of 16 bits, also where the vectors have the other one."""
    made = Dense(wire="float16"), Dense(wire="bfloat16")
    trials = [Trial(one, 5003, 2, dtype) for one in made for dtype in ("float32", *FLOATS, "bfloat16")]
    return over([Ring()], *trials, *(Trial(made[0], n, 2) for n in (0, 1))) + over([Star(), None], trials[0], trials[4])


def cascading(size: int) -> Trials:
    """Return the trials of cascading SSDM."""
    of_types = (Trial(CascadingSSDM(seed=2), 5003, 2, dtype) for dtype in FLOATS)
    return over(topologies(size), Trial(CascadingSSDM(), LONG, 2)) + over([Ring()], *of_types)


def marsit(size: int) -> Trials:
    """Return the trials of Marsit."""
    own, paper = Marsit(3), Marsit(3, residual="paper", seed=-1)
    never_dense = (
        Marsit(None, gamma="auto", clip=0.5, seed=7),
        Marsit(None, residual="paper", global_step=0.3),
        Marsit(None, global_step=0.5, compensation=False),
    )
    lengths = (64, 4096 + 128, LONG - 64 - 4096 - 128)
    of_types = [Trial(own, 5003, 4, dtype) for dtype in (*FLOATS, "bfloat16")] + [Trial(paper, 5003, 4, "float16")]
    return [
        *over(topologies(size), Trial(own, LONG, 4)),
        *over([Ring(), DoubleTree()], Trial(paper, LONG, 4)),
        *over([Torus()], *(Trial(one, LONG, 4) for one in never_dense)),
        *over([None], Trial(never_dense[0], 1, 4), *(Trial(one, 5003, 4) for one in never_dense)),
        *over([Ring()], *of_types, *(Trial(one, LONG, 4, lengths=lengths) for one in (own, paper))),
    ]


def winners(count: int) -> Callable[[int], Trials]:
    """Return what makes the trials of Marsit with shared selection."""

    def trials(size: int) -> Trials:
        merged, rounds = (Marsit(every, winners=count, seed=7) for every in (None, 3))
        of_rounds = (Trial(rounds, n, 4) for n in (6001, 65, 1))
        lengths = (140_001, 6001, 65, 1)  # "auto" takes another way for the first
        return over([Ring()], Trial(merged, LONG, 4), *of_rounds) + over(
            [None], *(Trial(merged, n, 4) for n in lengths)
        )

    return trials


def votes(options: Any, where: Sequence[Topology], short: int, *types: str, lengths: bool = False) -> Trials:
    """Return the trials of a method whose counts are exact, and so the same over every topology."""
    segments = (65, 4096 + 1, 1, VOTES - 128 - 4096 - 64 - 64)
    trials = [Trial(options, VOTES, 4, dtype) for dtype in types]
    trials += [Trial(options, VOTES, 4, lengths=segments)] if lengths else []
    return [
        *over(where, Trial(options, VOTES, 4)),
        *over([HalvingDoubling()], *trials),
        *over([None], Trial(options, short, 4)),
    ]


def coded(*methods: Any) -> Callable[[int], Trials]:
    """Return what makes the trials of a method whose reference is slow: short vectors, and few with other floats."""

    def trials(size: int) -> Trials:
        first = methods[0]
        others = (Trial(first, 2003, 2, dtype) for dtype in (*FLOATS, "bfloat16"))
        shorts = (Trial(first, n, 2) for n in (0, 1))
        return over([Ring()], *(Trial(one, 900, 5) for one in methods), *others, *shorts)

    return trials


def shared(*methods: ScaleCom | RandomK | TrueTopK, every_topology: bool = False) -> Callable[[int], Trials]:
    """Return what makes the trials of a method whose ranks send the same elements."""

    def trials(size: int) -> Trials:
        n, first = 3001, methods[0]
        # as many steps as there are leaders, and one more
        steps = max(6, size + 1)
        found = over(
            [Ring()], *(Trial(one, n, steps) for one in methods), *(Trial(first, few, 3) for few in (0, 1, 99))
        )
        found += over(
            [DoubleTree()],
            Trial(first, n, steps),
            *(Trial(one, n, 4, dtype) for one in methods[:2] for dtype in (*FLOATS, "bfloat16")),
        )
        return found + over(topologies(size) if every_topology else [], Trial(first, n, 4))

    return trials


def rates(size: int) -> Trials:
    """Return the trials of ScaleCom with a rate for each tensor."""
    lengths = (1024, 64, 3001 - 1024 - 64)
    made = (ScaleCom(rates=(25, 1, 400)), ScaleCom(rates=(25, 50, 5), chunk=200))
    return over([Ring()], *(Trial(one, 3001, 3, lengths=lengths, vector_id=0) for one in made))


def low_rank(size: int) -> Trials:
    """Return the trials of PowerSGD: tensors that are matrices, and others too short for it."""
    lengths = (1024, 10, 700, 3001 - 1024 - 64 - 704)
    first, second = PowerSGD(2, start_step=2, seed=3), PowerSGD(5, start_step=0)
    shorts = (Trial(second, n, 2) for n in (0, 1, 99))
    types = (Trial(first, 3001, 4, dtype, lengths) for dtype in (*FLOATS, "bfloat16"))
    return [
        *over([Ring()], Trial(first, 3001), Trial(PowerSGD(1), 907), *shorts, *types),
        *over([*topologies(size)], Trial(second, 3001, 4, lengths=lengths)),
    ]


def sparse_loco(size: int) -> Trials:
    """Return the trials of SparseLoCo: tensors shorter than a chunk, short last chunks, and star's second pass."""
    n, method = 9000, SparseLoCo()
    lengths = (4096 + 65, 1, 700, n - 4096 - 128 - 64 - 704)
    made = (SparseLoCo(8, 200, bits=32, decay=1.0), SparseLoCo(1, 1, decay=0.0), SparseLoCo(50, 100, alpha=0.7))
    of_types = (Trial(method, n, 3, dtype, lengths) for dtype in (*FLOATS, "bfloat16"))
    scaled = (Trial(made[2], 2003, 2, dtype) for dtype in (*FLOATS, "bfloat16"))
    return [
        *over(topologies(size), Trial(method, n, 4, lengths=lengths)),
        *over([Ring()], *(Trial(method, few, 2) for few in (0, 1, 99)), *(Trial(one, 2003, 4) for one in made)),
        *over([Ring()], *of_types, *scaled),
        *over([None], Trial(method, n, 3)),
    ]


def relay(size: int) -> Trials:
    """Return the trials of Relay: all levels, short buckets, tensors, and short vectors whose codes are gathered."""
    n, method = min(size + 1, 9) * 4096 + 11, Relay()  # every rank has a chunk, and the last block is short
    lengths = (4096 + 65, 1, 700, n - 4096 - 128 - 64 - 704)
    of_levels = (Relay(levels, bucket) for levels, bucket in ((2, 256), (3, 64), (8, 128), (16, 192), (256, 640)))
    of_types = (Trial(method, 5003, 3, dtype, (4096, 1, 842)) for dtype in (*FLOATS, "bfloat16"))
    gathered = (Relay(), Relay(2, 64), Relay(3, 192), Relay(16))
    coded = (Relay(levels, 64, coding="entropy") for levels in (3, 4, 8, 16))
    return [
        *over(topologies(size), Trial(method, n, 4, lengths=lengths)),
        *over([Ring(), Star()], Trial(Relay(2, 64, residual="copy"), 5003, 3, lengths=(4096, 1, 842))),
        *over([Ring()], *(Trial(one, 5003, 4) for one in of_levels), *(Trial(method, few, 2) for few in (0, 1, 99))),
        *over([HalvingDoubling()], *of_types, Trial(Relay(3), 5003, 3, "float64")),
        *over([Ring(), Tree()], *(Trial(one, 9000, 3, lengths=(4096 + 65, 1, 4705)) for one in coded)),
        *over([None], *(Trial(one, few, 4) for one in gathered for few in (1, 65, 900))),
        *over([None], *(Trial(Relay(coding="entropy"), few, 4) for few in (1, 65, 600))),
        *over([None], *(Trial(method, 900, 3, dtype, (65, 772)) for dtype in (*FLOATS, "bfloat16"))),
    ]


_ef21 = coded(
    EF21("top-k:rate=10"),
    EF21(OneBit(64, "l1"), eta=1.0),
    EF21("levels:bucket=64", eta=0.5, both_ways=True),
    EF21("top-k:rate=7,chunk=70", both_ways=True),
    EF21("random-sparsification:p=0.75", eta=0.3, seed=5),
    EF21(Quantizer(64, 4), both_ways=True, seed=3),
)
# By name: called with the number of ranks, each gives trials with their topologies, None for "auto".
TRIALS: dict[str, Callable[[int], Trials]] = {
    "dense": dense,
    "dense, 16 bits": dense_in_16_bits,
    "cascading-ssdm": cascading,
    "marsit": marsit,
    "marsit, one winner": winners(1),
    "marsit, two winners": winners(2),
    "majority-vote": lambda size: votes(MajorityVote(seed=3), [*topologies(size)], 3, "float16"),
    "ef-signsgd": lambda size: votes(EFSignSGD(), [Ring(), Torus(), DoubleTree()], 1, *FLOATS, lengths=True),
    "ef-signsgd, buckets": lambda size: votes(EFSignSGD(1000), [Ring(), Torus()], 700, *FLOATS, lengths=True),
    "ef-signsgd, short and long buckets": lambda size: (
        votes(EFSignSGD(7), [], 700) + votes(EFSignSGD(9000), [Tree()], 700)
    ),
    "ssdm": lambda size: votes(SSDM(seed=3), [Torus()], 65),
    "ssdm, norm and momentum": lambda size: votes(
        SSDM(seed=3, momentum=0.9, scale="norm"), [HalvingDoubling()], 700, "float64", lengths=True
    ),
    "ssdm, correlated": lambda size: votes(SSDM(seed=3, correlated=True), [Torus()], 65),
    "ssdm, elias": lambda size: votes(SSDM(seed=3, scale="norm", coding="elias"), [Ring(), DoubleTree(), Star()], 65),
    "qsgd": coded(QSGD(), QSGD(levels=4, bucket=100), QSGD(correlated=True), QSGD(coding="entropy", correlated=True)),
    "ecq-sgd": coded(
        ECQSGD(alpha=0.3, bucket=512),
        ECQSGD(alpha=0.3, beta=0.9, bucket=4096),
        ECQSGD(alpha=0.3, bucket=1000, levels=1, coding="fixed"),
    ),
    "terngrad": coded(
        TernGrad(bucket=500), TernGrad(bucket=1000), TernGrad(bucket=50, clip=None, seed=4), TernGrad(correlated=True)
    ),
    "one-bit-sgd": coded(OneBitSGD(), OneBitSGD(bucket=512)),
    "double-squeeze": coded(
        DoubleSqueeze(),
        DoubleSqueeze(OneBit(64, "l1")),
        DoubleSqueeze(Quantizer(500, 2, "l2"), seed=3),
        DoubleSqueeze("quantize:coding=entropy,bucket=640"),
        DoubleSqueeze("clip:bits=11"),
        DoubleSqueeze("levels:bucket=64"),
        DoubleSqueeze("levels:bucket=64,coding=entropy"),
        DoubleSqueeze("top-k:rate=10"),
        DoubleSqueeze("random-sparsification:p=0.9", seed=5),
    ),
    "mem-sgd": coded(
        MemSGD(TwoMeans(512)),
        MemSGD(OneBit(512)),
        MemSGD(Ternary(256)),
        MemSGD("levels:levels=3"),
        MemSGD("levels:levels=8,coding=entropy"),
        MemSGD("random-sparsification:p=0.75"),
    ),
    "power-sgd": low_rank,
    "relay": relay,
    "local-top-k": coded(
        LocalTopK(50),
        LocalTopK(10),
        LocalTopK(10, momentum=0.9),
        LocalTopK(10, 70, momentum=0.9, masking=True),
    ),
    "local-top-k, masked momentum": coded(LocalTopK(10, momentum=0.9, masking=True)),
    "top-k-sgd": coded(TopKSGD(50), TopKSGD(7)),
    "scalecom": shared(
        ScaleCom(rate=10, chunk=70, warmup_steps=2),
        ScaleCom(rate=25, beta=0.3),
        ScaleCom(rate=10),
        ScaleCom(rate=50, exact=True),
        every_topology=True,
    ),
    "scalecom, momentum": shared(
        ScaleCom(rate=10, momentum=0.9, masking=True),
        ScaleCom(rate=25, beta=0.3, momentum=0.5, masking=True),
        ScaleCom(rate=10, chunk=70, momentum=0.9),
    ),
    "scalecom, rates": rates,
    "random-k": shared(RandomK(rate=7, seed=5), RandomK(rate=20, beta=0.5, warmup_steps=1)),
    "sparse-loco": sparse_loco,
    "ef21": lambda size: (
        *_ef21(size),
        *over([Star(), DoubleTree()], *(Trial(EF21("top-k:rate=10", both_ways=one), 900, 4) for one in (False, True))),
    ),
    "true-top-k": shared(TrueTopK(rate=10, chunk=40), TrueTopK(rate=30, exact=True, beta=0.7)),
}
# methods that are not listed, such as a young one of mpicomp.contrib, in the forms of their registration
TRIALS |= {
    one.name: coded(*(one.kind(**options) for options in one.forms))
    for one in REGISTERED.values()
    if one.name not in TRIALS
}
