"""Time a call on one rank with one thread and with several, in turn. Medians count.

``python -m apps.performance.threads``. The rank has all cores of the machine to itself. One rank sends nothing: what is
timed is encoding and decoding. A copy of the vector in the same way shows the limit of the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from apps.performance.durations import summary
from apps.performance.part import MS, Part, Row, get, in_unit, make_record, vectors
from apps.records import Record
from collectives import Communicator
from collectives.execution.call import Call
from collectives.execution.jobs import in_parts
from collectives.execution.traffic import Traffic
from mpicomp import (
    ECQSGD,
    QSGD,
    CascadingSSDM,
    DoubleSqueeze,
    LocalTopK,
    MajorityVote,
    Marsit,
    OneBitSGD,
    ScaleCom,
    TernGrad,
)
from mpicomp.cli.timing import alternate
from mpicomp.codecs import TopK

METHODS: dict[str, Any] = {
    "qsgd": QSGD(),
    "qsgd, entropy coding": QSGD(coding="entropy"),
    "ecq-sgd": ECQSGD(),
    "terngrad": TernGrad(),
    "local-top-k": LocalTopK(),
    "local-top-k, 10 of 1000": LocalTopK(rate=100, chunk=1000),
    "scalecom": ScaleCom(),
    "scalecom, 10 of 1000": ScaleCom(rate=100, chunk=1000),
    "double-squeeze, top-k": DoubleSqueeze(TopK()),
    "one-bit-sgd": OneBitSGD(),
    "cascading-ssdm": CascadingSSDM(),
    "majority-vote": MajorityVote(),
    "marsit, winners=1": Marsit(full_precision_every=None, winners=1),
}
COMPUTE_BOUND = frozenset(
    {"qsgd", "qsgd, entropy coding", "ecq-sgd", "terngrad", "local-top-k", "local-top-k, 10 of 1000",
     "double-squeeze, top-k"}
)  # fmt: skip
COPY = "copy, for comparison"
PIECE = 1 << 19  # elements


def copy(comm: Communicator, x: Any, out: Any) -> None:
    """Copy a vector in pieces as those of methods, by all threads of a communicator."""
    call = Call(comm, lambda: "copy")
    cuts = [slice(*ends) for ends in pairwise([*range(0, x.size, PIECE), x.size])]
    copy_one = partial(_copy, x, out)
    comm.run(call, in_parts(call, Traffic(), "seconds_encoding", copy_one, cuts, comm.workers))


def _copy(x: Any, out: Any, cut: slice) -> None:
    np.copyto(out[cut], x[cut])


def measure(n: int, threads: int, repeats: int) -> Record:
    """Time every method."""
    rows: list[Row] = []
    x, out = vectors(n)
    with Communicator() as one, Communicator(threads=threads) as several:
        comms = {"one": one, "several": several}
        for name in (COPY, *METHODS):
            calls: dict[str, Callable[[], object]] = {
                which: partial(copy, comm, x, out)
                if name == COPY
                else partial(METHODS[name].start(comm, n).aggregate, x, out)
                for which, comm in comms.items()
            }
            timed = {which: summary(seconds) for which, seconds in alternate(calls, repeats).items()}
            one_s, several_s = (timed[which]["median_s"] for which in calls)
            target = "≥ 1.7" if name in COMPUTE_BOUND else ""
            rows.append(
                {"method": name, "one_s": one_s, "several_s": several_s, "ratio": one_s / several_s, "target": target}
            )
        return make_record(rows, n=n, threads=threads, repeats=repeats)


COLUMNS = (
    ("method", get("method")),
    ("1 thread, ms", in_unit("one_s", MS)),
    ("several threads, ms", in_unit("several_s", MS)),
    ("times as fast", get("ratio", ".2f")),
    ("target", get("target")),
)
PART = Part(
    "threads",
    "Calls on one rank with one thread and with several.",
    measure,
    COLUMNS,
    quick={"n": 100_000, "threads": 2, "repeats": 3},
    full={"n": 25_000_000, "threads": 2, "repeats": 15},
)

if __name__ == "__main__":
    sys.exit(PART.main())
