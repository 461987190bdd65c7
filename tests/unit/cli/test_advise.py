"""Advice of `mpicomp advise` for networks and speeds, and errors for unusable arguments."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpicomp
from collectives import Communicator, Ring
from collectives.cost.link import ComputeModel, LinkModel
from collectives.progress.polling import rest_by
from collectives.schedules.broadcast import AllGather
from collectives.threads.run_local import run_local
from mpicomp.aggregator.arguments import expression
from mpicomp.aggregator.registration import UNTRIED
from mpicomp.algorithms import Dense, Marsit
from mpicomp.cli.advise import add_arguments, predicted_methods, predictions, report, speeds
from mpicomp.cli.advise.predict import (
    MOST_WALKED,
    PredictedJob,
    Way,
    break_even,
    call_seconds,
    fastest_dense,
    topologies,
    ways,
)
from mpicomp.cli.advise.report import COMPARED, LEARNING, METHODS, Grade, choose, explain_passed_over, lines_to_copy
from mpicomp.cli.advise.request import AdviseRequest
from mpicomp.cli.advise.speeds import NodeSpeed, Speed, _solve
from mpicomp.cli.command import UsageError
from tests.documents import PROJECT, inline_code, tables

HEAD = {
    "ranks": 4,
    "nodes": None,
    "threads": 1,
    "hosts": 1,
    "not_predicted": [],
    "network": asdict(LinkModel(1e-5, 1e6)),
}
SPEED = Speed(ComputeModel(4e-10, 1e-10, 3e-10, 5e-6), 1e-4)
DENSE_SPEED = Speed(ComputeModel(0.0, 5e-10, 0.0, 5e-6), 5e-5)
N = 1_000_000


def whole_text(record: dict[str, Any]) -> str:
    return "\n".join((*report.heading(record), *report.rows(record, record["rows"]), report.conclusion(record)))


def request(*arguments: str) -> AdviseRequest:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return AdviseRequest.parse(parser.parse_args(arguments))


def job_on(network: LinkModel, size: int = 4) -> PredictedJob:
    return PredictedJob(size, N, "float32", network, 57_344)


def advised(bandwidth: float, *arguments: str) -> dict[str, Any]:
    asked = request("--count", str(N), *arguments)
    speeds = {name: DENSE_SPEED if name == "dense" else SPEED for name in asked.methods}
    return predictions(asked, job_on(LinkModel(5e-5, bandwidth)), speeds, None) | {"hosts": 4}


@pytest.mark.parametrize(
    ("bandwidth", "arguments", "advice"),
    [
        (1e7, ("--methods", "marsit-100,marsit"), "Compress with marsit over .*; on links above "),
        (1e11, ("--methods", "marsit-100,marsit"), r"Do not compress: .*\. It would pay on links below "),
        (1e7, ("--compute-ms", "1e6"), r"Do not compress: .*: the all-reduce is too small a part of it\.$"),
    ],
)
def test_compressing_is_advised_where_links_are_slow_for_the_computing_of_a_step(
    bandwidth: float, arguments: tuple[str, ...], advice: str
) -> None:
    assert re.match(advice, report.advice(advised(bandwidth, *arguments)))


def test_mpi_is_a_dense_sum_too() -> None:
    advice = report.advice(advised(1e7) | {"mpi_s": 1e-4})
    assert advice.startswith("Do not compress: a step takes 100 us without")
    assert "would pay" not in advice


def test_the_report_has_a_line_for_every_method_and_topology() -> None:
    record = advised(1e7)
    lines = whole_text(record).splitlines()
    every = [name for name, _ in topologies(4, LinkModel(0.0, 1.0))]
    own = {name: METHODS[name].message_model(N, "float32", 4, 57_344).route for name in METHODS}
    expected = [(name, of) for name, route in own.items() for of in (every if route is None else [route.name])]
    assert [tuple(line.split()[:2]) for line in lines[3 : 3 + len(expected)]] == expected
    assert not lines[3 + len(expected)]
    assert {("qsgd", "all-gather"), ("double-squeeze", "direct"), ("scalecom", "star")} < set(expected)
    assert "80 Mbit/s" in lines[1]
    assert whole_text(record | {"mpi_s": 0.25}).splitlines()[2].endswith("250 ms; below is predicted")


def test_methods_for_comparison_are_advised_only_where_no_others_were_requested() -> None:
    both = advised(1e6, "--methods", "random-k,scalecom")
    assert min(both["rows"], key=lambda row: row["seconds"])["method"] in COMPARED
    assert report.advice(both).startswith("Compress with scalecom over ")
    assert report.advice(advised(1e6, "--methods", "random-k")).startswith("Compress with random-k over ")


def told(*rows: tuple[str, str, float], mpi_s: float | None = None, compute_s: float = 0.0) -> dict[str, Any]:
    """A record of (method, topology, seconds of an all-reduce), beside a dense sum that takes a second."""
    found = [
        {"method": method, "topology": topology, "compared": method in COMPARED, "seconds": seconds,
         "per_node": False, "step_s": seconds + compute_s, "break_even_bytes_s": None}
        for method, topology, seconds in (("dense", "ring", 1.0), *rows)
    ]  # fmt: skip
    of_job = {"count": N, "dtype": "float32", "network": {"bandwidth_bytes_s": 1e6}, "mpi_s": mpi_s}
    of_job |= {"ranks_per_node": None, "nodes": None}
    return of_job | {"threads": 1, "dense_s": 1.0, "compute_s": compute_s, "rows": found}


def test_steps_with_local_steps_are_predicted_for_exact_means_and_the_fastest_way_of_each_kind() -> None:
    ways = ("marsit-100", "ring", 0.3), ("marsit", "ring", 0.2), ("relay", "tree", 0.5), ("relay", "ring", 0.4)
    of_gradients_or_behind = ("double-squeeze", "direct", 0.1), ("sparse-loco", "all-gather", 0.1)
    record = told(*ways, *of_gradients_or_behind, compute_s=2.0)
    lines = [
        "If the training bears local steps, a step takes, where updates are averaged",
        "  every 10 steps: 2.1 s with exact means, 2.02 s with marsit over ring, 2.04 s with relay over ring",
        "  every 30 steps: 2.033 s with exact means, 2.007 s with marsit over ring, 2.013 s with relay over ring",
    ]
    assert "\n".join(["", *lines, "", report.advice(record)]) in report.conclusion(record)
    assert "local steps" not in report.conclusion(told(*of_gradients_or_behind))


@pytest.mark.parametrize(
    ("marsit_s", "compute_s", "advised"),
    [
        (0.2, 0.0, "marsit"),  # faster, and learns better
        (0.28, 0.0, "marsit"),  # a tie: predictions of 0.24 and 0.28 are too close
        (0.31, 0.0, "ef-signsgd"),
        (0.31, 2.0, "marsit"),  # a tie: steps of 2.24 and 2.31
    ],
)
def test_of_ways_that_are_about_as_fast_the_one_that_learns_better_is_advised(
    marsit_s: float, compute_s: float, advised: str
) -> None:
    ways = ("marsit", "tree", 0.6), ("marsit", "ring", marsit_s), ("ef-signsgd", "ring", 0.24)
    choice = choose(told(*ways, compute_s=compute_s))
    assert (choice.row["method"], choice.row["topology"], choice.compress) == (advised, "ring", True)


def test_a_method_that_learns_better_is_not_advised_where_it_would_not_pay() -> None:
    choice = choose(told(("marsit", "ring", 0.97), ("ef-signsgd", "ring", 0.9)))
    assert (choice.row["method"], choice.compress) == ("ef-signsgd", True)


def test_each_way_that_is_faster_than_the_advice_has_a_reason() -> None:
    record = told(
        ("marsit", "ring", 0.28), ("ef-signsgd", "ring", 0.26), ("ef-signsgd", "torus:2x2", 0.27),
        ("random-k", "ring", 0.1), ("scalecom", "ring", 0.5),
    )  # fmt: skip
    signs, random = explain_passed_over(record, choose(record))
    assert signs.startswith("ef-signsgd over ring, torus:2x2: a step is 7.1% shorter, too little to prefer it to")
    assert random.startswith("random-k over ring: it sends elements without looking at them")
    slower = told(("marsit", "ring", 0.97))
    assert explain_passed_over(slower, choose(slower)) == [
        "marsit over ring: a step is 3.0% shorter than without, which is not worth the noise of compressing"
    ]
    assert "Predicted to be faster, but passed over:\n  marsit over ring: " in whole_text(slower | HEAD)


def test_the_lines_to_copy_make_the_advised_method() -> None:
    for name, method in METHODS.items():
        assert (
            type(method).__name__ not in mpicomp.algorithms.__all__
            or eval(expression(method), vars(mpicomp.algorithms)) == method
        ), name

    def copied(*rows: tuple[str, str, float], mpi_s: float | None = None) -> str:
        record = told(*rows, mpi_s=mpi_s)
        lines = lines_to_copy(record, choose(record))
        compile("\n".join(lines), "copied", "exec")
        return lines[1]

    marsit = "mpicomp.Marsit(full_precision_every=None)"
    assert copied(("marsit", "ring", 0.1)) == f'comm, method = mpicomp.Communicator(topology="ring"), {marsit}'
    assert copied(("qsgd", "all-gather", 0.1)) == "comm, method = mpicomp.Communicator(), mpicomp.QSGD()"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpicomp.QSGD, "__module__", "theirs.methods")
        patch.setattr(mpicomp.algorithms, "__all__", ["Marsit"])
        record = told(("qsgd", "all-gather", 0.1))
        lines = lines_to_copy(record, choose(record))
    assert lines[0] == "import theirs.methods"
    assert lines[2] == "comm, method = mpicomp.Communicator(), theirs.methods.QSGD()"
    over_mpi = 'comm, method = mpicomp.Communicator(topology="mpi"), mpicomp.Dense()'
    assert copied(("marsit", "ring", 0.5), mpi_s=0.2) == over_mpi


@pytest.mark.timeout(240)  # a first optimizer loads torch's compiler
def test_threads_that_were_asked_for_are_in_the_report_and_in_the_lines_to_copy() -> None:
    record = advised(1e6, "--threads", "2")
    assert whole_text(record | {"hosts": 1, "mpi_s": None}).startswith("# 4 ranks of 2 threads; measured")
    assert ", threads=2)" in lines_to_copy(record, choose(record))[1]


def test_the_lines_to_copy_run() -> None:
    import torch

    record = told(("marsit", "ring", 0.1))
    model = torch.nn.Linear(3, 2)
    names = {"mpicomp": mpicomp, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    *lines, other = lines_to_copy(record, choose(record))
    exec("\n".join([*lines, other.partition(": ")[2]]), names)
    with names["comm"]:
        assert names["aggregator"].n == N
        assert names["optimizer"].synchronize is not None


def test_the_learning_record_is_that_of_the_docs() -> None:
    table = tables(PROJECT / "docs" / "choose.md")["record"]
    listed = {name: Grade[row[0].strip("`").replace(" ", "_").upper()] for row in table for name in inline_code(row[1])}
    assert listed == {name: learned.grade for name, learned in LEARNING.items() if learned is not UNTRIED}
    assert LEARNING.keys() == METHODS.keys() - {"dense"}


def test_methods_that_are_not_predicted_for_many_ranks_are_named() -> None:
    asked = request("--count", "1e6", "--methods", "marsit,qsgd")
    job = job_on(LinkModel(5e-5, 1e8), MOST_WALKED + 1)
    record = predictions(asked, job, dict.fromkeys(asked.methods, SPEED), None) | {"hosts": 4}
    assert {row["topology"] for row in record["rows"]} == {"ring", "torus:5x13", "halving-doubling"}
    told = "\n# not predicted for so many ranks: tree, double-tree, star, segmented-ring, all-gather, direct\n"
    assert told in whole_text(record)


def test_methods_with_a_route_of_their_own_are_left_out_among_many_ranks() -> None:
    asked = request("--count", "1e6", "--methods", "marsit,qsgd")
    assert {*predicted_methods(asked, [MOST_WALKED], 57_344)} == {"dense", "marsit", "qsgd"}
    assert {*predicted_methods(asked, [MOST_WALKED + 1], 57_344)} == {"dense", "marsit"}
    assert "qsgd" in predicted_methods(asked, [2 * MOST_WALKED, MOST_WALKED], 57_344)  # between nodes


def test_methods_of_which_none_is_predicted_are_refused_before_they_are_measured() -> None:
    asked = request("--count", "1e6", "--methods", "qsgd,double-squeeze")
    told = r"--methods .*(qsgd|double-squeeze): .*predicted for 64 ranks or fewer, not for 128: name another method"
    with pytest.raises(UsageError, match=told):
        predicted_methods(asked, [128], 57_344)


def test_codes_of_varying_length_travel_for_as_long_as_they_are() -> None:
    job = job_on(LinkModel(0.0, 1e6))
    whole, half = (
        call_seconds(job, METHODS["ecq-sgd"], AllGather(), Speed(ComputeModel(), 0.0, volume)) for volume in (1.0, 0.5)
    )
    assert half == pytest.approx(whole / 2, rel=1e-3)


def test_one_winner_is_advised_where_bytes_count_and_two_winners_take_as_long_as_merging() -> None:
    merged, one, two = (
        call_seconds(job_on(LinkModel(0.0, 1e6)), METHODS[name], topology, SPEED)
        for name, topology in (("marsit", Ring()), ("marsit-1-winner", AllGather()), ("marsit-2-winners", AllGather()))
    )
    assert one == pytest.approx(merged / 2, rel=0.05)
    assert two == pytest.approx(merged, rel=0.05)
    names = "marsit,marsit-1-winner,marsit-2-winners"
    assert report.advice(advised(1e6, "--methods", names)).startswith("Compress with marsit-1-winner over all-gather")


def test_shared_selection_decodes_one_vector_for_any_number_of_ranks() -> None:
    decoding = Speed(ComputeModel(decode_s=1e-6), 0.0)
    few, many = (
        call_seconds(job_on(LinkModel(0.0, 1e12), size), METHODS["marsit-1-winner"], AllGather(), decoding)
        for size in (2, 32)
    )
    assert few == pytest.approx(N * 1e-6, rel=0.05)
    assert many == pytest.approx(few, rel=0.05)


# Nodes ---------------------------------------------------------------------------------------------------------------

NODES = NodeSpeed(2, 1e-4, 1e-9)
TWO_LEVEL = LinkModel(1e-6, 1e10, group_size=2, between_latency_s=5e-5, uplink_bytes_s=1e7)


def test_between_nodes_each_rank_has_its_part_of_the_vector_and_of_the_link() -> None:
    between = replace(job_on(TWO_LEVEL), nodes=NODES).between_nodes()
    assert (between.size, between.n, between.network) == (2, N // 2, LinkModel(5e-5, 0.5e7))
    racks = LinkModel(1e-6, 1e7, group_size=4, between_latency_s=5e-5, uplink_bytes_s=1e6)
    between = replace(job_on(racks, 8), nodes=NODES).between_nodes()
    assert between.network == LinkModel(1e-6, 1e7, group_size=2, between_latency_s=5e-5, uplink_bytes_s=0.5e6)


def test_a_way_between_nodes_takes_the_time_of_both_levels() -> None:
    job = replace(job_on(TWO_LEVEL), nodes=NODES)
    method = METHODS["marsit"]
    found = [way for _, way in ways(job, {"marsit": (method, SPEED)}, DENSE_SPEED) if way.per_node]
    ring = next(way for way in found if isinstance(way.topology, Ring))
    between = call_seconds(job.between_nodes(), method, Ring(), SPEED)
    assert ring.seconds(job) == pytest.approx(1e-4 + N * 1e-9 + between)
    # half of a vector's bits pass the link of a node twice, as those of two ranks
    assert between > 2 * N / 8 / 1e7 / 2
    plain = Way("marsit", method, Ring(), SPEED, DENSE_SPEED).seconds(job)
    assert 1.2 < plain / ring.seconds(job) < 1.6  # of a ring of four, each rank sends three halves of a vector


def advised_on_nodes(*arguments: str) -> dict[str, Any]:
    asked = request("--count", str(N), *arguments)
    speeds = {name: DENSE_SPEED if name == "dense" else SPEED for name in asked.methods}
    nodes = NodeSpeed(2, 1e-5, 1e-11)
    return predictions(asked, replace(job_on(TWO_LEVEL), nodes=nodes), speeds, None) | {"hosts": 2}


def test_ways_between_nodes_are_in_the_report_and_in_the_lines_to_copy() -> None:
    record = advised_on_nodes("--methods", "marsit", "--ranks-per-node", "2")
    told = whole_text(record)
    assert "\n# per node: 2 nodes of 2 ranks, which sum and gather the vector in 20 us\n" in told
    assert re.search(r"^marsit +ring, per node +", told, re.MULTILINE)
    choice = choose(record)
    assert choice.row["per_node"]
    assert f"Compress with marsit over {choice.row['topology']}, per node: " in told
    made = lines_to_copy(record, choice)[1]
    assert made.endswith("ranks_per_node=2), mpicomp.PerNode(mpicomp.Marsit(full_precision_every=None))")
    json.dumps(record)


def test_break_even_between_nodes_leaves_memory_as_it_is() -> None:
    job = replace(job_on(TWO_LEVEL), nodes=replace(NODES, element_s=1e-6))  # slower than the dense sum's links
    way = Way("marsit", METHODS["marsit"], Ring(), SPEED, DENSE_SPEED, per_node=True)
    even = break_even(way, fastest_dense(job, DENSE_SPEED), job)
    assert even is not None
    assert even < job.network.bandwidth_bytes_s


def test_sums_within_nodes_are_timed_where_nodes_have_several_ranks() -> None:
    def measured(comm: Communicator) -> NodeSpeed | None:
        return speeds.measure_nodes(comm, 10_000, "float32", quick=True)

    found = run_local(4, measured, ranks_per_node=2)
    assert found[0] == found[3]
    assert found[0].ranks == 2
    assert 0 < found[0].call_s < 1
    assert run_local(3, measured, ranks_per_node=2) == [None] * 3
    assert run_local(2, measured, ranks_per_node=2) == run_local(2, measured, ranks_per_node=1) == [None] * 2


def test_at_break_even_both_take_as_long() -> None:
    job = job_on(LinkModel(5e-5, 1e8))
    dense = fastest_dense(job, DENSE_SPEED)
    way = Way("marsit", Marsit(None), Ring(), SPEED, DENSE_SPEED)
    even = break_even(way, dense, job)
    assert even is not None
    there = job.scale_links(even / 1e8)
    assert way.seconds(there) == pytest.approx(dense(there), rel=0.02)


def test_a_method_that_computes_too_long_never_pays_and_a_free_one_always_does() -> None:
    job = job_on(LinkModel(0.0, 1e8))
    dense = fastest_dense(job, DENSE_SPEED)
    for speed, even in ((Speed(ComputeModel(encode_s=1e3), 0.0), None), (Speed(ComputeModel(), 0.0), math.inf)):
        assert break_even(Way("marsit", Marsit(None), Ring(), speed, DENSE_SPEED), dense, job) == even


def test_full_precision_rounds_count_for_their_part() -> None:
    job = job_on(LinkModel(5e-5, 1e7))
    bit, dense = call_seconds(job, Marsit(None), Ring(), SPEED), call_seconds(job, Dense(), Ring(), DENSE_SPEED)
    mixed = Way("m", Marsit(10), Ring(), SPEED, DENSE_SPEED).seconds(job)
    assert mixed == pytest.approx(0.9 * bit + 0.1 * dense)


def test_a_torus_follows_the_groups() -> None:
    names = [name for name, _ in topologies(12, LinkModel(0.0, 1.0, group_size=6))]
    assert "torus:2x6" in names
    assert "torus:3x4" in names
    assert not any("torus" in name for name, _ in topologies(5, LinkModel(0.0, 1.0)))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "either --count 25e6 or --model"),
        (("--count", "5", "--model", "a:b"), "either --count"),
        (("--count", "1e3,1e4"), "--count 1e3,1e4: give one number"),
        (("--count", "many"), "--count many"),
        (("--count", "5", "--dtype", "int8"), "--dtype int8: choose one of"),
        (("--count", "5", "--compute-ms", "-1"), "--compute-ms -1: give a number of at least 0"),
        (("--count", "5", "--ranks", "1"), "--ranks 1: give a whole number of at least 2"),
        (("--count", "5", "--ranks", "2.5"), "--ranks 2.5: give a whole number of at least 2"),
        (("--count", "5", "--timeout", "0"), "--timeout 0"),
        (("--count", "5", "--methods", "marsit, marzipan"), "--methods marsit, marzipan: there is no 'marzipan'"),
        (("--count", "5", "--methods", "dense"), "--methods dense: name one or more to compare with dense"),
        (("--count", "5", "--network", "/nowhere/network.json"), "--network /nowhere/network.json: No such file"),
        (("--model", "torch"), "write it as package.module:callable"),
        (("--model", "torch.nn:Nothing"), "--model torch.nn:Nothing: AttributeError"),
        (("--model", "sys:exit"), "--model sys:exit: SystemExit; write it as package.module:callable"),
        (("--model", "torch.nn:ReLU"), "has no trainable parameters"),
    ],
)
def test_arguments_that_cannot_be_used_are_reported(arguments: tuple[str, ...], problem: str) -> None:
    if "--model" in arguments:
        pytest.importorskip("torch")
    with pytest.raises(ValueError, match=problem.replace(".", r"\.")):
        request(*arguments)


def test_a_model_says_how_long_its_gradient_is() -> None:
    pytest.importorskip("torch")
    found = request("--model", "tests.unit.cli.test_advise:linear")
    assert found.count == 7 * 3 + 3


def test_a_model_may_be_in_the_folder_in_which_the_command_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model_of_mine.py").write_text("from tests.unit.cli.test_advise import linear\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert request("--model", "model_of_mine:linear").count == 7 * 3 + 3


def linear() -> Any:
    import torch

    return torch.nn.Linear(7, 3)


@pytest.mark.parametrize(
    ("bytes_s", "text"), [(125e6, "1 Gbit/s"), (1.25e6, "10 Mbit/s"), (125, "1 kbit/s"), (1.25e9, "10 Gbit/s")]
)
def test_rates_as_network_people_say_them(bytes_s: float, text: str) -> None:
    assert report.rate(bytes_s) == text


@pytest.mark.parametrize(
    ("more", "less", "most_s", "expected"),
    [
        ((40, 1000, 40 * 3.0 + 1000 * 0.5), (20, 200, 20 * 3.0 + 200 * 0.5), math.inf, (3.0, 0.5)),
        ((40, 1000, 10.0), (40, 250, 2.5), math.inf, (0.0, 0.01)),  # bytes alone
        ((40, 1000, 10.0), (20, 200, 8.0), math.inf, (0.25, 0.0)),  # less for more: messages alone
        ((6, 1000, 10.0), (6, 1000, 10.0), math.inf, (10 / 6, 0.0)),
        ((25, 1000, 7.0), (25, 1000, 7.0), math.inf, (7 / 25, 0.0)),  # 7 - 25 * (7 / 25) is not 0
        # no message takes longer than a whole call leaves it: bytes take the rest
        ((40, 1000, 40 * 3.0 + 1000 * 0.5), (20, 200, 20 * 3.0 + 200 * 0.5), 1.0, (1.0, 0.58)),
    ],
)
def test_costs_of_messages_and_of_bytes_are_separated(
    more: tuple[int, float, float], less: tuple[int, float, float], most_s: float, expected: tuple[float, float]
) -> None:
    message_s, byte_s = _solve(more, less, most_s)
    assert (message_s, byte_s) == pytest.approx(expected)
    assert byte_s >= 0


def test_of_ranks_that_poll_and_ranks_that_sleep_the_lesser_cost_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(*arguments: object) -> NDArray[np.float64]:
        of_a_call = [9.0, 3.0, 2.0, 1.0, 7.0] if rest_by(None) else [20.0, 2.0, 2.5, 0.5, 7.0]
        return np.array([[of_a_call] * 3] * 2)

    monkeypatch.setattr(speeds, "_calls", calls)
    found = speeds._costs(None, Dense(), 1, "float32", 3)
    assert found.tolist() == [2.0, 2.0, 0.5, 3.0, 7.0]  # encoding, merging, decoding, the rest: 9 - 3 - 2 - 1; bytes


def test_help_says_where_the_vectors_are_that_predictions_are_for() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert "vectors in the host's memory" in " ".join(parser.format_help().split())
