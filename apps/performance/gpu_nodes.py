"""Predict training steps on nodes with several GPUs, by the rate of the links between the nodes, and advise a method.

``python -m apps.performance.gpu_nodes`` prints the table of docs/gpu-nodes.md; ``--publish`` writes it into the page.
Nothing is measured here. The times of exchanges are those of the model of `mpicomp advise`. Kernels have the times of
the H100 of docs/performance-gpu.md, and each bucket the host's time there during backward. Computing,
links within a node and the host's work for a byte are assumptions, which options and constants set.

A step that averages gradients is forward, then the longer of backward and exchange, and the host's time of all
buckets. Backward takes two thirds of computing. Local steps exchange at the end of every tenth step.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from apps.appendices import publish
from apps.launch import PROJECT
from apps.performance.gpu_machine import positive
from apps.performance.part import MS, format_seconds, table
from collectives import LinkModel, Ring
from collectives.cost.link import ComputeModel
from mpicomp.algorithms import Algorithm, Dense, Relay
from mpicomp.cli.advise.predict import PredictedJob, Way
from mpicomp.cli.advise.speeds import NodeSpeed, Speed

PAGE, MEASURED = PROJECT / "docs" / "gpu-nodes.md", PROJECT / "docs" / "performance-gpu.md"
NAME = "gpu-nodes"
RATES = (1, 10, 25, 100)  # Gbit/s of a node
ETHERNET = 1448 / 1514  # payload of a frame
BETWEEN_S, INSIDE_S, INSIDE_BYTES_S = 50e-6, 10e-6, 150e9
HOST_BYTE_S = 0.25e-9  # a core sends or receives 4 GB/s over TCP
PIECE_BYTES = 1 << 18
MEASURED_ELEMENTS, MEASURED_BUCKETS = 1e8, 16
BACKWARD = 2 / 3  # of computing
LOCAL_STEPS = 10
GPU_BYTES, LOCAL_BYTES = 64e9, 28  # of a GPU, and of a parameter with AdamW and the copies of local steps
ENOUGH = 1.25
"""Times computing: a step that is no longer is taken, rather than a way that changes learning more."""


class Model(NamedTuple):
    """A model: its parameters, and the buckets of its gradients, one for each layer and one for the rest."""

    name: str
    parameters: int
    buckets: int


MODELS = (Model("125 M", 125_000_000, 13), Model("1 B", 1_000_000_000, 25), Model("7 B", 7_000_000_000, 33))


class Gpu(NamedTuple):
    """Seconds that were measured: of an element in the kernels, and of the host for a bucket."""

    encode_s: float
    decode_s: float
    bucket_s: float


@dataclass(frozen=True)
class Cluster:
    """Nodes, GPUs of each, tokens of a GPU in a step, and the rate at which it computes."""

    nodes: int = 8
    gpus: int = 4
    tokens: int = 16_384
    tflops: float = 400.0

    def computing_s(self, model: Model) -> float:
        """Return the time of forward and backward."""
        return 6 * model.parameters * self.tokens / (self.tflops * 1e12)

    def job(self, n: int, rate: float) -> PredictedJob:
        """Return an all-reduce of `n` elements over links of `rate` Gbit/s."""
        link = LinkModel(INSIDE_S, INSIDE_BYTES_S, 0.0, self.gpus, BETWEEN_S, rate * 1e9 / 8 * ETHERNET)
        crossing_s = 2 * 4 * (self.gpus - 1) / self.gpus / INSIDE_BYTES_S  # reduce-scatter and all-gather
        inside = NodeSpeed(self.gpus, 2 * INSIDE_S, crossing_s)
        return PredictedJob(self.nodes * self.gpus, n, "float32", link, PIECE_BYTES, inside)


class Step(NamedTuple):
    """A way to train, in words of Python, and the seconds of a step."""

    way: str
    seconds: float


def read_measured(text: str | None = None) -> Gpu:
    """Return the times in the page of the H100's measurements.

    Raises
    ------
    ValueError
        The page lacks one of them.
    """
    page = MEASURED.read_text() if text is None else text
    kernels = re.search(r"^\| norms, quantize and pack; unpack and dequantize \| (\d+); (\d+) \|", page, re.MULTILINE)
    steps = re.search(r"^\| forward and backward of a GPT .*\((\d+\.\d) and (\d+\.\d) ms", page, re.MULTILINE)
    if kernels is None or steps is None:
        raise ValueError(f"{MEASURED.name} has no row of the quantizer's kernels, or none of the GPT's step")
    encode_us, decode_us = map(int, kernels.groups())
    alone_ms, beside_ms = map(float, steps.groups())
    unit = 1e-6 / MEASURED_ELEMENTS
    return Gpu(encode_us * unit, decode_us * unit, 1e-3 * (beside_ms - alone_ms) / MEASURED_BUCKETS)


def exchange_s(algorithm: Algorithm, job: PredictedJob, gpu: Gpu) -> float:
    """Return the time in which NCCL sums within nodes, and a method averages between them; Dense stands for NCCL."""
    dense = Speed(ComputeModel(), 0.0)
    # a hop decodes, adds and encodes again
    work = ComputeModel(gpu.encode_s, gpu.decode_s + gpu.encode_s, gpu.decode_s, byte_s=HOST_BYTE_S)
    speed = dense if isinstance(algorithm, Dense) else Speed(work, 0.0)
    return Way("", algorithm, Ring(), speed, dense, per_node=True).seconds(job)


def overlapped_s(computing_s: float, exchanging_s: float, host_s: float = 0.0) -> float:
    """Return the time of a step whose exchange overlaps with backward."""
    backward_s = BACKWARD * computing_s
    return computing_s - backward_s + max(backward_s, exchanging_s) + host_s


def steps(cluster: Cluster, model: Model, rate: float, gpu: Gpu) -> Iterator[Step]:
    """Yield the ways to train a model: two without compression, and then ours, which change learning more and more."""
    computing_s, job = cluster.computing_s(model), cluster.job(model.parameters, rate)
    halved_s = exchange_s(Dense(), cluster.job(model.parameters // 2, rate), gpu)  # as many bytes in 16 bits
    host_s = model.buckets * gpu.bucket_s
    yield Step("float32", overlapped_s(computing_s, exchange_s(Dense(), job, gpu)))
    yield Step("bfloat16", overlapped_s(computing_s, halved_s))
    yield Step("Relay(16)", overlapped_s(computing_s, exchange_s(Relay(16), job, gpu), host_s))
    if LOCAL_BYTES * model.parameters <= GPU_BYTES:  # FSDP's shards have no local steps
        called_s = {'Dense(wire="bfloat16")': halved_s, "Relay()": exchange_s(Relay(), job, gpu)}
        for way, seconds in called_s.items():
            yield Step(f"{way}, {LOCAL_STEPS} local steps", computing_s + (seconds + host_s) / LOCAL_STEPS)


def choose(found: Sequence[Step], computing_s: float) -> Step:
    """Return the first way, from bfloat16 on, that is not much longer than computing, else the fastest one."""
    return next((one for one in found[1:] if one.seconds <= ENOUGH * computing_s), min(found, key=lambda one: one[1]))


def render(cluster: Cluster, gpu: Gpu) -> str:
    """Return the table as Markdown."""
    rows = []
    for rate in RATES:
        for model in MODELS:
            computing_s = cluster.computing_s(model)
            found = [*steps(cluster, model, rate, gpu)]
            chosen, (dense, half, ours) = choose(found, computing_s), found[:3]
            local = found[3].seconds if len(found) > 3 else None
            exact_s = local if local and chosen in found[3:] else min(dense.seconds, half.seconds)
            cells = [_duration(one) for one in (computing_s, dense.seconds, half.seconds, ours.seconds, local)]
            gain = f"{exact_s / chosen.seconds:.1f}"
            rows.append([f"{rate} Gbit/s", model.name, *cells, f"`{chosen.way}`", _duration(chosen.seconds), gain])
    headings = (
        "link", "parameters", "computing", "dense, float32", "dense, bfloat16", "`Relay(16)`",
        f"dense, {LOCAL_STEPS} local steps", "choose", "its step", "of dense",
    )  # fmt: skip
    settings = (
        f"{cluster.nodes} nodes of {cluster.gpus} GPUs, {cluster.tokens:,} tokens and {cluster.tflops:g} TFLOP/s a "
        "GPU; measured with the quantizer and with Marsit, and taken for Relay: "
        f"{gpu.encode_s * 1e12:.1f} and {gpu.decode_s * 1e12:.1f} ps to encode and decode an element, "
        f"{format_seconds(gpu.bucket_s, MS)} ms of the host for a bucket"
    )
    columns = [(heading, itemgetter(at)) for at, heading in enumerate(headings)]
    return f"{table(columns, rows)}\n\n<sub>{settings}.</sub>"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{format_seconds(seconds, MS)} ms" if seconds < 1 else f"{format_seconds(seconds, 1.0)} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.performance.gpu_nodes", description=__doc__.partition("\n")[0]
    )
    default = Cluster()
    for name in ("nodes", "gpus", "tokens"):
        parser.add_argument(f"--{name}", type=positive(int), default=getattr(default, name), help="(%(default)s)")
    parser.add_argument("--tflops", type=positive(float), default=default.tflops, help="of a GPU (%(default)s)")
    parser.add_argument("--publish", action="store_true", help="write the table into the page")
    options = vars(parser.parse_args(argv))
    is_published = options.pop("publish")
    body = render(Cluster(**options), read_measured())
    if is_published:
        publish(PAGE, NAME, body)
    else:
        print(body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
