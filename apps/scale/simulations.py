"""The time of one all-reduce on a modelled network, remembered in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from collectives import DoubleTree, HalvingDoubling, LinkModel, Ring, Topology, Torus, Tree
from collectives.cost.link import ComputeModel
from mpicomp.algorithms import Algorithm, Dense, Marsit
from mpicomp.cli.advise.predict import PredictedJob, call_seconds
from mpicomp.cli.advise.speeds import Speed

MODEL = 1  # another number when the simulator counts otherwise: times in the file are then computed again
PIECE_BYTES = 57_344  # packed payloads between nodes
METHODS: dict[str, Algorithm] = {
    "dense": Dense(),
    "one-bit": Marsit(None),
    "one winner": Marsit(None, winners=1),
    "two winners": Marsit(None, winners=2),
}
TOPOLOGIES = ("ring", "torus", "tree", "double-tree", "halving-doubling")
MERGING = ("dense", "one-bit")
"""Over every topology; the payloads of the other methods go round a ring whatever the topology."""
LINES = (*((topology, method) for topology in TOPOLOGIES for method in MERGING),
         *(("ring", method) for method in METHODS if method not in MERGING))  # fmt: skip
# Seconds per element of one core, from docs/performance-tables.md: residual and pack, merge, unpack; adding. To draw
# winners, pick their signs and put them in their places takes 0.02 ns more for one winner and 0.05 for two (timed by
# hand, on 4 to 256 ranks).
WORKS = {
    "dense": ComputeModel(merge_s=0.3e-9),
    "one-bit": ComputeModel(0.34e-9, 0.08e-9, 0.18e-9),
    "one winner": ComputeModel(encode_s=0.35e-9, decode_s=0.19e-9),
    "two winners": ComputeModel(encode_s=0.36e-9, decode_s=0.21e-9),
}


@dataclass(frozen=True)
class Point:
    """One all-reduce of `n` elements of float32."""

    topology: str
    method: str
    ranks: int
    n: int
    network: LinkModel

    @property
    def key(self) -> str:
        """Key in the file."""
        return json.dumps([MODEL, asdict(self), asdict(WORKS[self.method]), PIECE_BYTES], sort_keys=True)

    def seconds(self) -> float:
        """Simulate it."""
        algorithm = METHODS[self.method]
        route = algorithm.message_model(self.n, "float32", self.ranks, PIECE_BYTES).route
        job = PredictedJob(self.ranks, self.n, "float32", self.network, PIECE_BYTES)
        return call_seconds(job, algorithm, route or self._plans(), Speed(WORKS[self.method], 0.0))

    def _plans(self) -> Topology:
        """A torus has a row for each group of ranks, or is square."""
        group = self.network.group_size
        if self.topology == "torus":
            return Torus(cols=group) if group is not None and self.ranks > group else Torus()
        return {"ring": Ring, "tree": Tree, "double-tree": DoubleTree, "halving-doubling": HalvingDoubling}[
            self.topology
        ]()


def simulate(points: Iterable[Point], path: Path, processes: int | None = None) -> dict[Point, float]:
    """Seconds of each point; those in the file `path` are not simulated again, others are added to it."""
    known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    wanted = list(dict.fromkeys(points))
    # the longest first, so that no process ends long after the others
    missing = sorted((point for point in wanted if point.key not in known), key=lambda point: -point.ranks)
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(processes) as pool:
            for point, seconds in zip(missing, pool.map(Point.seconds, missing), strict=True):
                known[point.key] = seconds
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(known, indent=0) + "\n")
                partial.replace(path)
    return {point: known[point.key] for point in wanted}


def powers(most: int) -> Sequence[int]:
    """Numbers of ranks: 4, 16, ... up to `most`."""
    found = [4]
    while found[-1] * 4 <= most:
        found.append(found[-1] * 4)
    return found
