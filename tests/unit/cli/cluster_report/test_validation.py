"""The check of a report accepts what the schema allows, and names each kind of damage with its cure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from mpicomp.cli.cluster_report import validation
from mpicomp.cli.cluster_report.measurement import ALGORITHMS, METHODS
from mpicomp.cli.cluster_report.training import STEPS
from mpicomp.cli.cluster_report.validation import COMPRESSED, SCHEMA, problems
from tests.cluster_reports import sample

Damage = Callable[[dict[str, Any]], object]


def put(*path: Any, value: Any) -> Damage:
    def damage(report: Any) -> None:
        for key in path[:-1]:
            report = report[key]
        report[path[-1]] = value

    return damage


def drop(*path: str) -> Damage:
    def damage(report: Any) -> None:
        for key in path[:-1]:
            report = report[key]
        del report[path[-1]]

    return damage


def test_a_report_is_valid() -> None:
    assert problems(sample()) == []


def test_the_schema_has_the_names_that_are_measured() -> None:
    calls = SCHEMA["properties"]["allreduce"]["items"]["properties"]
    assert set(calls["calls"]["items"]["properties"]["name"]["enum"]) >= {*ALGORITHMS, *METHODS}
    assert {*calls["best_dense"]["enum"]} - {None} == {*calls["calls"]["items"]["properties"]["name"]["enum"]} - {
        *METHODS
    }
    assert {*METHODS} == {*COMPRESSED}
    steps = SCHEMA["properties"]["training"]["properties"]["steps"]["items"]["properties"]
    assert steps["name"]["enum"] == [*STEPS]


def test_every_keyword_of_the_schema_is_one_that_the_check_knows() -> None:
    known = {
        "$ref", "type", "const", "enum", "pattern", "minimum", "exclusiveMinimum", "minItems", "properties", "required",
        "additionalProperties", "items", "description",
    }  # fmt: skip

    def keywords(schema: dict[str, Any]) -> set[str]:
        parts = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
        if "properties" in schema:
            assert schema["additionalProperties"] is False
            assert set(schema["required"]) == set(schema["properties"])
        return set(schema).union(*map(keywords, parts))

    assert keywords({key: SCHEMA[key] for key in SCHEMA if key not in ("$schema", "title", "$defs")}) <= known
    assert set().union(*map(keywords, SCHEMA["$defs"].values())) <= known


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (put("hostname", value="node17"), "hostname: no field of a report; delete it"),
        (put("machine", "host", value="n"), "machine.host: no field of a report; delete it: names of hosts, users and"),
        (put("allreduce", 0, "calls", 0, "second", value=1), "second: no field of a report (did you mean 'seconds'?)"),
        (put("machine", "cpus", value=["/home/ada/cpu"]), "machine.cpus[0]: '/home/ada/cpu' does not fit (name of a"),
        (put("machine", "cpus", value=["node17.cluster.example"]), "machine.cpus[0]: 'node17.cluster.example' does"),
        (put("machine", "cpus", value=["ada@node17"]), "without path, address or name of a host"),
        (put("machine", "cpus", value=["two\nlines"]), "machine.cpus[0]"),
        (put("machine", "cpus", value=[]), "machine.cpus: [] does not fit"),
        (put("machine", "gpus_per_node", 0, "count", value=0), "machine.gpus_per_node[0].count: 0 does not fit"),
        (put("mpi", "library", value="~/mpi"), "mpi.library: '~/mpi' does not fit"),
        (put("versions", "torch", value="2.5.1+ada"), "versions.torch: '2.5.1+ada' does not fit (version number"),
        (put("date", value="yesterday"), "date: 'yesterday' does not fit (day as 2026-12-31)"),
        (drop("ranks_per_node"), "ranks_per_node: missing; measure again with mpicomp bench --report"),
        (drop("network", "latency_s"), "network.latency_s: missing"),
        (put("network", "latency_s", value=0), "network.latency_s: 0 does not fit (exclusiveMinimum 0); correct"),
        (put("network", "latency_s", value=math.nan), "network.latency_s: nan is not of type number"),
        (put("network", "group_size", value=True), "network.group_size: True is not of type integer or null"),
        (put("took_seconds", value="long"), "took_seconds: 'long' is not of type number"),
        (put("allreduce", value={}), "allreduce: {} is not of type array"),
        (put("allreduce", 0, "calls", 0, "name", value="my ring"), "allreduce[0].calls[0].name: 'my ring' does not"),
        (put("training", "skipped", value="rank 3 on node17 died"), "training.skipped: 'rank 3 on node17 died' does"),
        (put("training", "skipped", value="error: no /home/ada"), "training.skipped: 'error: no /home/ada' does not"),
        (put("training", "skipped", value="error: no memory"), "skipped is 'error: no memory', with 3 timed calls"),
        (put("allreduce", 0, "calls", 1, "median_s", value=0.01), "median_s of MPI ring is 0.01, of its seconds 0.02"),
        (put("training", "steps", 2, "median_s", value=0.01), "training: median_s of relay is 0.01, of its seconds"),
        (put("allreduce", 0, "best_dense", value="dense ring"), "best_dense is 'dense ring', by the medians 'MPI"),
        (put("allreduce", 1, "skipped", value=None), "allreduce[1]: skipped is None, with 0 timed calls"),
        (put("training", "skipped", value="time"), "training: skipped is 'time', with 3 timed calls"),
        (put("schema", value=2), "schema: it is version 2, and this mpicomp reads 1: use the mpicomp that wrote the"),
        (put("schema", value=True), "schema: True is not of type integer"),
    ],
)  # fmt: skip
def test_each_kind_of_damage_is_named(damage: Damage, told: str) -> None:
    report = sample()
    damage(report)
    (problem,) = problems(report)
    assert told in problem
    assert "\n" not in problem
    assert ";" in problem or problem.startswith("schema: it is")  # a cure follows


@pytest.mark.parametrize("report", [None, [], "report", 1])
def test_another_text_is_no_report(report: Any) -> None:
    (problem,) = problems(report)
    assert problem.startswith("the file: ")


def test_all_problems_are_listed() -> None:
    report = sample()
    del report["date"], report["mpi"]
    report["user"] = "ada"
    assert len(problems(report)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "AMD EPYC 9654 96-Core Processor", "AMD Ryzen AI 9 HX 370 w/ Radeon 890M",
        "Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "Neoverse-N1", "NVIDIA GeForce RTX 4090", "Open MPI",
        "Cray MPICH", "aarch64",
    ],
)  # fmt: skip
def test_names_of_products_are_accepted(name: str) -> None:
    report = sample()
    report["machine"]["cpus"] = [name]
    assert validation.problems(report) == []
