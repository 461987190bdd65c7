"""The page that helps to choose a method: its formulas, its form and its table."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from itertools import product
from typing import Any

import pytest

import mpicomp
from collectives import LinkModel, Ring
from collectives.cost.link import ComputeModel
from mpicomp.algorithms import Algorithm
from mpicomp.cli.advise.predict import PredictedJob, call_seconds
from mpicomp.cli.advise.report import ACCURACY, LEARNING, WORTH
from mpicomp.cli.advise.speeds import Speed
from tests.documents import DOCUMENTS, PROJECT, prose, tables

SCRIPT = PROJECT / "docs" / "site" / "choose.js"
PAGE = next(page for page in DOCUMENTS if page.name == "choose.md")
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node")

METHODS: dict[str, Algorithm] = {
    "dense": mpicomp.Dense(),
    "marsit-100": mpicomp.Marsit(full_precision_every=None),
    "marsit": mpicomp.Marsit(full_precision_every=None),
    "relay": mpicomp.Relay(),
    "double-squeeze": mpicomp.DoubleSqueeze(),
    "scalecom": mpicomp.ScaleCom(),
    "sparse-loco": mpicomp.SparseLoCo(),
}
LATENCY_S, CALL_S, LOCAL_STEPS, PAYLOAD = 50e-6, 0.4e-3, 30, 1448 / 1514
# Nanoseconds of a rank's processor per element, and the part of them before the first message.
CODEC = {
    "dense": (0.80, 0.0),
    "marsit-100": (0.70, 0.0),
    "marsit": (0.70, 0.0),
    "relay": (0.90, 0.0),
    "double-squeeze": (1.65, 0.0),
    "scalecom": (1.36, 0.45),
    "sparse-loco": (1.90, 0.55),
}


def job(n: float, per_node: int, nodes: int, rate: float, compute_s: float = 0.2, **options: bool) -> dict[str, Any]:
    return {"n": n, "perNode": per_node, "nodes": nodes, "bitsPerSecond": rate, "computeS": compute_s, **options}


def traffic(name: str, one: dict[str, Any]) -> tuple[float, int]:
    """Return the bytes through the link of a node, and the messages that follow each other."""
    n, per_node, ranks = one["n"], one["perNode"], one["perNode"] * one["nodes"]
    share, ring = 2 * (ranks - 1) / ranks, 2 * (ranks - 1)
    match name:
        case "dense":
            return share * 4 * n, ring
        case "marsit" | "marsit-100":
            return share * n / 8, ring
        case "relay":
            return share * 2.125 * n / 8, ring
        case "double-squeeze":
            return 2 * per_node * (ranks - per_node) / ranks * 1.001 * n / 8, 2
        case "scalecom":
            return share * n / 100 * (4 + 7 * ranks / (16 * (ranks - 1))), ring
        case _:
            return (ranks - 1) * n / 64 * 14 / 8, ranks - 1


def all_reduce_s(name: str, one: dict[str, Any]) -> float:
    """Return the formula of the page: call + part before the first message + the longer of transfer and codec."""
    nbytes, rounds = traffic(name, one)
    codec_ns, first = CODEC[name]
    codec, latency = codec_ns * 1e-9 * one["n"], LATENCY_S * rounds
    transfer = 8 * nbytes / (PAYLOAD * one["bitsPerSecond"])
    path = latency + transfer if one["perNode"] == 1 else max(latency, transfer)
    return CALL_S + first * codec + max(path, (1 - first) * codec)


def rows_of(one: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return seconds and bytes of a step's all-reduce, by method."""
    found = {}
    for name in METHODS:
        seconds, nbytes = all_reduce_s(name, one), traffic(name, one)[0]
        if name == "marsit-100":
            seconds += (all_reduce_s("dense", one) - seconds) / 100
            nbytes += (traffic("dense", one)[0] - nbytes) / 100
        if name == "sparse-loco":
            seconds, nbytes = seconds / LOCAL_STEPS, nbytes / LOCAL_STEPS
        found[name] = seconds, nbytes
    return found


def recommended(one: dict[str, Any]) -> str:
    """Apply the rule of `mpicomp advise` to the methods that the options allow."""
    rows, compute_s = rows_of(one), one["computeS"]
    steps = {name: seconds + compute_s for name, (seconds, _) in rows.items()}
    left_out = {"dense"}
    if not one.get("withoutMomentum"):
        left_out.add("scalecom")
    if not one.get("localSteps"):
        left_out.add("sparse-loco")
    eligible = [name for name in rows if name not in left_out]
    fastest = min(eligible, key=steps.__getitem__)
    as_fast = [
        name
        for name in eligible
        if steps["dense"] >= WORTH * steps[name]
        and (steps[name] < WORTH * steps[fastest] or rows[name][0] < ACCURACY * rows[fastest][0])
    ]
    return min(as_fast, key=lambda name: (LEARNING[name].grade, steps[name]), default="dense")


JOBS = [
    job(n, per_node, nodes, rate, compute_s, **options)
    for n, (per_node, nodes), rate, compute_s, options in product(
        (4e6, 25e6, 1e9),
        ((1, 2), (1, 4), (4, 4), (8, 2)),
        (1e8, 1e9, 1e10, 2.5e10),
        (0.0, 0.2, 5.0),
        ({}, {"withoutMomentum": True}, {"localSteps": True}),
    )
]


def modelled_s(name: str, one: dict[str, Any]) -> float:
    """Return the time by the model behind `mpicomp advise`: the plan of the method, message by message."""
    n, per_node, ranks = int(one["n"]), one["perNode"], one["perNode"] * one["nodes"]
    rate = PAYLOAD * one["bitsPerSecond"] / 8
    network = LinkModel(LATENCY_S, rate) if per_node == 1 else LinkModel(
        LATENCY_S, 1e11, group_size=per_node, uplink_bytes_s=rate
    )  # fmt: skip
    codec_ns, first = CODEC[name]
    codec_s, shared = codec_ns * 1e-9, ranks / (ranks - 1)
    if name == "dense":
        work = ComputeModel(merge_s=codec_s * shared)
    elif name == "scalecom":
        work = ComputeModel(encode_s=first * codec_s, decode_s=(1 - first) * codec_s)
    elif name == "sparse-loco":  # every rank's codes are decoded
        work = ComputeModel(encode_s=first * codec_s, decode_s=(1 - first) * codec_s / ranks)
    elif name == "double-squeeze":
        work = ComputeModel(encode_s=codec_s / 2, decode_s=codec_s / 2)
    else:
        work = ComputeModel(encode_s=0.45 * codec_s, merge_s=0.1 * codec_s * shared, decode_s=0.45 * codec_s)
    all_reduce = PredictedJob(ranks, n, "float32", network, 1 << 18)
    route = METHODS[name].message_model(n, "float32", ranks, 1 << 18).route or Ring()
    return float(call_seconds(all_reduce, METHODS[name], route, Speed(work, CALL_S)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "marsit-100"])
def test_the_formulas_are_within_30_percent_of_the_model_of_advise(name: str) -> None:
    for n, (per_node, nodes), rate in product((4e6, 25e6, 250e6), ((1, 2), (1, 8), (4, 4)), (1e8, 1e9, 1e10, 2.5e10)):
        one = job(n, per_node, nodes, rate)
        assert all_reduce_s(name, one) == pytest.approx(modelled_s(name, one), rel=0.3), one


@needs_node
def test_the_form_computes_the_formulas_and_the_rule_of_advise() -> None:
    program = (
        f"const form = require({json.dumps(str(SCRIPT))});"
        "const jobs = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "console.log(JSON.stringify(jobs.map((job) => [form.estimate(job), form.recommend(job)])));"
    )
    done = subprocess.run(
        [str(NODE), "-e", program], input=json.dumps(JOBS), capture_output=True, text=True, timeout=50, check=True
    )
    answers = json.loads(done.stdout)
    assert len(answers) == len(JOBS)
    for one, (rows, best) in zip(JOBS, answers, strict=True):
        expected = rows_of(one)
        assert [row["name"] for row in rows] == list(expected)
        for row in rows:
            seconds, nbytes = expected[row["name"]]
            assert math.isclose(row["seconds"], seconds, rel_tol=1e-9)
            assert math.isclose(row["bytes"], nbytes, rel_tol=1e-9)
            assert math.isclose(row["stepS"], seconds + one["computeS"], rel_tol=1e-9)
        assert best == recommended(one), one


@needs_node
def test_grades_are_the_learning_records_of_advise() -> None:
    program = f"console.log(JSON.stringify(require({json.dumps(str(SCRIPT))}).METHODS.map((m) => [m.name, m.grade])))"
    done = subprocess.run([str(NODE), "-e", program], capture_output=True, text=True, timeout=50, check=True)
    for name, grade in json.loads(done.stdout)[1:]:
        assert grade == LEARNING[name].grade, name


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def test_the_table_for_readers_without_the_form_has_its_results() -> None:
    found = tables(PAGE)["million parameters"]
    assert len(found) >= 9
    for millions, link, *steps, best in found:
        gbits = float(link.split()[0]) / (1000 if "Mbit/s" in link else 1)
        one = job(1e6 * float(millions.replace(" ", "")), 1, 4, 1e9 * gbits)
        expected = [duration(seconds + one["computeS"]) for seconds, _ in rows_of(one).values()]
        assert steps == expected, (millions, link, expected)
        assert best == f"`{recommended(one)}`", (millions, link)


def test_the_page_has_the_place_of_the_form_and_the_constants() -> None:
    text = PAGE.read_text()
    assert '<div id="choose-form"></div>' in text
    cells = {row[0].strip("`"): row[1:3] for row in tables(PAGE)["method"]}
    for name, (codec_ns, first) in CODEC.items():
        assert cells[name] == [f"{codec_ns:.2f}", f"{first:g}"], name
    for constant in (f"{LATENCY_S * 1e6:g} µs", f"{CALL_S * 1e3:g} ms", f"{LOCAL_STEPS} steps", "1448 of 1514"):
        assert constant in prose(PAGE), constant
