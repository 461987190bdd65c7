"""Pipelines of four stages on slow links: activations in full, in few bits, and as differences to the last message.

Every stage trains its slice of one model, with one method and schedule after the other. All take turns. AQ-SGD is timed
once every example has been visited. *Computing* is the time of a micro-batch on a stage while all stages compute: the
processor's time, times as many as share one. From it and the size of messages follows the rate at which float32 needs
`RATIO` times as long for its messages as for computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apps.environment import environment
from apps.launch import JobFailed
from apps.performance.cluster.driver import ClusterJob
from apps.performance.cluster.grid import Cluster
from apps.performance.part import vectors
from apps.records import Record, read_record
from collectives import Communicator
from mpicomp.cli.timing import alternate, gather, spin_barrier
from mpicomp.codecs import Draw, FullRows, RowQuantizer
from mpicomp.kernels.streams import Stream

if TYPE_CHECKING:
    from mpicomp.pipeline import PipelineStage

STAGES, REPEATS = 4, 5
RATES = ("none", "10gbit", "1gbit", "500mbit", "300mbit", "100mbit")
RATIO, SLOW = 5.0, "pipeline-slow"
"""Messages over computing, and the record's name at the rate that follows from it."""
PAYLOAD_PART = 0.956
"""Of the rate that is asked for; the rest is headers."""
SCHEDULES = ("1f1b", "gpipe")
BITS = ((2, 4), (3, 6), (4, 8))
"""Of activations and of their gradients."""
ALIVE_MICRO_BATCHES = 16
COMPUTED, CODED = 15, 9


@dataclass(frozen=True)
class Method:
    """Codecs of activations and gradients; with `deltas` that of activations codes differences."""

    forward: FullRows | RowQuantizer
    backward: FullRows | RowQuantizer
    deltas: bool = False

    def compressions(self, examples: int) -> tuple[Any, Any]:
        """Return the compressions of a stage that trains on so many examples, forward and backward."""
        from mpicomp.pipeline import Deltas, Direct  # torch, which other jobs can do without

        forward = Deltas(self.forward, examples=examples) if self.deltas else Direct(self.forward)
        return forward, Direct(self.backward)


def bits_names(method: str) -> list[str]:
    """Return the names of a method's measurements with few bits, such as ``"AQ-SGD fw2 bw4"``."""
    return [f"{method} fw{forward} bw{backward}" for forward, backward in BITS]


FP32, DIRECT, DELTAS = "fp32", bits_names("DirectQ"), bits_names("AQ-SGD")
METHODS: Mapping[str, Method] = {
    FP32: Method(FullRows(), FullRows()),
    "fp16": Method(FullRows("float16"), FullRows("float16")),
    **{
        name: Method(RowQuantizer(forward), RowQuantizer(backward), name in DELTAS)
        for names in (DIRECT, DELTAS)
        for name, (forward, backward) in zip(names, BITS, strict=True)
    },
}


def measure_here(comm: Communicator, repeats: int, **load_options: int) -> Record:
    """Time steps of all methods and schedules, computing and codecs; collective. The options are those of a `Load`."""
    import torch  # which other jobs can do without

    from apps.performance.pipeline_load import Load, module_and_loss

    torch.set_num_threads(1)
    load = Load(**load_options)
    module, loss = module_and_loss(load, comm.rank, comm.size)
    computing = _time_computing(comm, module, loss, load)
    steps = {
        f"{schedule}, {name}": _step(comm, module, loss, load, schedule, name)
        for schedule in SCHEDULES
        for name in METHODS
    }
    timed = alternate(steps, repeats, load.batches + 1, comm)
    rows = [
        {
            "schedule": schedule,
            "method": name,
            "times_s": timed[f"{schedule}, {name}"].tolist(),
            "median_s": float(np.median(timed[f"{schedule}, {name}"])),
        }
        for schedule in SCHEDULES
        for name in METHODS
    ]
    return {
        "part": "pipeline",
        "load": asdict(load),
        "batch": load.batch,
        "parameters": int(gather(comm, np.array([float(sum(one.numel() for one in module.parameters()))])).sum()),
        "environment": environment(),
        "computing": computing,
        "codecs": {name: _time_coding(comm, load, name) for name in METHODS},
        "rows": rows,
        "alive": {schedule: _alive(comm, module, loss, load, schedule) for schedule in SCHEDULES},
    }


def make_stage(
    comm: Communicator, module: Any, loss: Any, load: Any, schedule: str, name: str, **options: Any
) -> PipelineStage:
    """Make this rank's stage, which sends by the method of this name; collective. `options` are `PipelineStage`'s."""
    from mpicomp.pipeline import PipelineStage

    forward, backward = METHODS[name].compressions(load.epoch)
    return PipelineStage(
        module, comm, load.micro_batches, loss=loss, schedule=schedule, forward=forward, backward=backward,
        **options,
    )  # fmt: skip


def _step(comm: Communicator, module: Any, loss: Any, load: Any, schedule: str, name: str) -> Callable[[], None]:
    from apps.performance.pipeline_load import trainer

    return trainer(make_stage(comm, module, loss, load, schedule, name), load)


def _alive(comm: Communicator, module: Any, loss: Any, load: Any, schedule: str) -> list[int]:
    """Return how many of `ALIVE_MICRO_BATCHES` each stage keeps activations of at one time; collective."""
    from apps.performance.pipeline_load import Load, trainer

    many = Load(**asdict(load) | {"micro_batches": ALIVE_MICRO_BATCHES, "batches": 1})
    stage = make_stage(comm, module, loss, many, schedule, FP32)
    trainer(stage, many)()
    return [int(one) for one in gather(comm, np.array([float(stage.most_alive)]))[:, 0]]


def _time_computing(comm: Communicator, module: Any, loss: Any, load: Any) -> dict[str, float]:
    """Processor seconds of a micro-batch on a stage, while all compute: medians, and the mean over stages; collective.

    Unlike the time on the wall they do not depend on other load of the machine.
    """
    import torch

    characters, following = (text[: load.examples] for text in load.texts())
    activations = torch.randn(load.examples, load.context, load.width)
    samples = []
    for _ in range(COMPUTED):
        into = characters if comm.rank == 0 else activations.clone().requires_grad_()
        spin_barrier(comm)
        start = time.thread_time()
        output = module(into)
        output = output if loss is None else loss(output, following)
        between = time.thread_time()
        torch.autograd.backward(output, None if loss else torch.ones_like(output))
        samples.append([between - start, time.thread_time() - between])
    medians = np.median(gather(comm, np.array(samples))[:, 1:], axis=1).mean(axis=0)
    return dict(zip(("forward_processor_s", "backward_processor_s"), medians.tolist(), strict=True))


def _time_coding(comm: Communicator, load: Any, name: str) -> dict[str, float]:
    """Bytes of a micro-batch each way, and seconds of coding it on a middle stage while all do the same; collective."""
    rows, columns = load.rows
    method = METHODS[name]
    forward, backward = method.forward, method.backward
    x, out = (vector.reshape(rows, columns) for vector in vectors(rows * columns, comm))
    there, back = (np.empty(codec.nbytes(rows, columns), np.uint8) for codec in (forward, backward))
    draw = Draw(Stream(0, 0, "benchmark"), 0, 0)

    def all_of_them() -> None:
        if method.deltas:
            forward.encode_delta(x, out, there, draw)
            forward.decode_delta(there, out)
        else:
            forward.encode(x, there, draw)
            forward.decode(there, out)
        backward.encode(x, back, draw)
        backward.decode(back, out)

    seconds = float(np.median(alternate({name: all_of_them}, CODED, comm=comm)[name]))
    return {"forward_bytes": there.size, "backward_bytes": back.size, "seconds": seconds}


def jobs(records: Path) -> Iterator[ClusterJob]:
    """Give a job for each rate, and one at the rate that follows from the record without a limit."""
    clusters = [Cluster(STAGES, rate) for rate in RATES]
    paths = {cluster.rate: f"pipeline-{cluster.name}" for cluster in clusters}
    for cluster in clusters:
        yield ClusterJob(cluster, paths[cluster.rate], {"repeats": REPEATS})
    unlimited = records / "pipeline" / f"{paths['none']}.json"
    if not unlimited.exists():
        raise JobFailed("computing was not measured, so the slow rate is not known")
    yield ClusterJob(Cluster(STAGES, f"{slow_mbit(read_record(unlimited)):g}mbit"), SLOW, {"repeats": REPEATS})


def slow_mbit(record: Record) -> float:
    """The rate to ask for, in Mbit/s, so that float32's messages take `RATIO` times as long as computing."""
    seconds = RATIO * computing_s(record) * PAYLOAD_PART
    return float(f"{8e-6 * message_bytes(record, FP32) / seconds:.3g}")


def computing_s(record: Record) -> float:
    """Return the seconds of a micro-batch on a stage, forward and backward, while all stages compute."""
    return way_s(record, "forward") + way_s(record, "backward")


def way_s(record: Record, way: str) -> float:
    """The part that is "forward" or "backward"."""
    sharing = max(1.0, record["settings"]["nodes"] / record["environment"]["cores"])
    return float(sharing * record["computing"][f"{way}_processor_s"])


def message_bytes(record: Record, name: str) -> float:
    """Return the bytes that a middle stage sends for a micro-batch, forward and backward."""
    return float(record["codecs"][name]["forward_bytes"] + record["codecs"][name]["backward_bytes"])
