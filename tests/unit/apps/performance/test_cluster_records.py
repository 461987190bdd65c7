"""Records of the comparison on the emulated cluster: speed-ups, bounds, overlap, tables, plots."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.emulator.network import ClusterError
from apps.environment import environment
from apps.performance.cluster import __main__ as program
from apps.performance.cluster import driver, overlap, ratios
from apps.performance.cluster.grid import Cell, Cluster, product
from apps.performance.cluster.implementations import choose, of_library
from apps.performance.cluster.overlap import balance
from apps.performance.cluster.records import merge, read
from apps.performance.cluster.tables import NOTHING, overlap_table, tables
from apps.records import write_record
from collectives.execution.traffic import COSTS

ENVIRONMENT = environment() | {"memory_scaling": [1.5]}
COST = dict.fromkeys(COSTS, 0.001) | {"bytes_sent_most": 2e6}


def timed(*times: float, cost: dict[str, float] | None = None) -> dict[str, Any]:
    each = float(np.mean(times))
    sent = {"wire_bytes": 1e6, "wire_bytes_most": 2e6}
    return {"times_s": list(times), "elapsed_s": each, "cpu_s": each / 2, "cost": cost, **sent}


def part(library: str, timings: dict[str, Any], nbytes: int = 1_000_000, rate: str = "1gbit") -> dict[str, Any]:
    settings = Cell(Cluster(4, rate), nbytes).settings
    bits_per_s = 20e9 if rate == "none" else 0.95 * float(rate.removesuffix("mbit").removesuffix("gbit"))
    bits_per_s *= 1e9 if rate.endswith("gbit") else 1e6 if rate.endswith("mbit") else 1
    links = [{"what": "node0 to node1", "asked": rate, "bits_per_s": bits_per_s}]
    return {
        "part": "cluster",
        "library": library,
        "settings": settings,
        "environment": ENVIRONMENT | {"mpi": "MPICH 5" if library == "mpich" else "Open MPI 5"},
        "links": links,
        "timings": timings,
    }


def cell(nbytes: int = 1_000_000, rate: str = "1gbit", one_bit_s: float = 1.0) -> dict[str, Any]:
    timings = {
        "one-bit ring": timed(one_bit_s, cost=COST),
        "Marsit ring": timed(2.0, cost=COST),
        "dense ring": timed(6.0, cost=COST),
        "MPI default": timed(8.0),
        "MPI ring": timed(5.0),
        "MPI Rabenseifner": timed(4.0),
        "Gloo": timed(7.0),
    }
    on_mpich = {"one-bit ring": timed(2.0, cost=COST), "MPICH": timed(9.0)}
    return merge(
        [part("openmpi", timings, nbytes, rate), part("mpich", on_mpich, nbytes, rate)], {"dense auto": "no time"}
    )


def test_parts_of_a_cell_are_put_together_job_by_job() -> None:
    first = part("openmpi", {"dense ring": timed(1.0, 2.0, cost={"bytes_sent": 10.0}), "Gloo": timed(1.0)})
    second = part("openmpi", {"dense ring": timed(6.0, cost={"bytes_sent": 40.0})})
    on_mpich = part("mpich", {"dense ring": timed(4.0, cost={"bytes_sent": 10.0}), "MPICH": timed(5.0)})
    first["environment"] |= {"load": 0.2, "memory_scaling": [1.1]}
    on_mpich["environment"] |= {"memory_scaling": []}
    second["environment"] |= {"load": 1.2, "memory_scaling": [1.9]}
    first["advised"], second["advised"] = {"piece_bytes": 1}, {"piece_bytes": 2}
    merged = merge([first, on_mpich, second], {})
    assert list(merged["timings"]) == ["dense ring", "Gloo", "dense ring (MPICH job)", "MPICH"]
    ring = merged["timings"]["dense ring"]
    assert (ring["times_s"], ring["median_s"], ring["min_s"]) == ([1.0, 2.0, 6.0], (1.5 + 6.0) / 2, 1.0)
    assert (ring["elapsed_s"], ring["cost"]["bytes_sent"]) == (3.0, 20.0)
    assert merged["timings"]["Gloo"]["cost"] is None
    assert merged["environment"]["mpi"] == "Open MPI 5 and MPICH 5"
    assert merged["environment"]["memory_scaling"] == [1.1, 1.9]
    assert merged["environment"]["load"] >= 1.2
    assert merged["advised"] == [{"piece_bytes": 1}, {"piece_bytes": 2}]


def test_records_are_read_by_part_as_written(tmp_path: Path) -> None:
    record = cell()
    write_record(tmp_path / "a.json", record)
    assert read(tmp_path, "cluster") == [json.loads(json.dumps(record))]
    assert read(tmp_path, "overlap") == []


def test_speed_ups_name_their_baseline() -> None:
    record = cell()
    assert ratios.best_mpi(record) == ("MPI Rabenseifner", 4.0)
    assert ratios.best_dense(record) == ("MPI Rabenseifner", 4.0)
    assert ratios.speedup(record, "one-bit ring", ratios.BEST_DENSE) == 4.0
    assert ratios.speedup(record, "one-bit ring", "dense ring") == 6.0
    assert ratios.speedup(record, "one-bit ring", "dense auto") is None
    assert ratios.over_mpich(record) == 4.5
    # of each job, they are of its own times
    jobs = (((1.0, 3.0, 2.0), (8.0, 4.0)), ((4.0,), (2.0, 8.0, 16.0)))
    parts = [part("openmpi", {"one-bit ring": timed(*ours), "MPI ring": timed(*theirs)}) for ours, theirs in jobs]
    record = merge(parts, {})
    assert ratios.speedups_by_job(record, "one-bit ring", ratios.BEST_DENSE) == [6.0 / 2.0, 8.0 / 4.0]
    assert ratios.speedups_by_job(record, "one-bit ring", "dense ring") == []


def test_the_baseline_of_a_speed_up_is_the_fastest_without_compression() -> None:
    for name in ("Gloo", "dense ring", "MPI ring"):
        record = cell()
        record["timings"][name]["median_s"] = 3.0
        assert ratios.best_dense(record) == (name, 3.0)
        assert ratios.speedup(record, "Marsit ring", ratios.BEST_DENSE) == 1.5


def test_the_speed_up_of_the_defaults_includes_a_dense_call_in_a_hundred() -> None:
    record = cell()
    assert ratios.default_speedup(record) == pytest.approx(4.0 / (0.99 * 2.0 + 0.01 * 6.0))
    del record["timings"]["dense ring"]
    assert ratios.default_speedup(record) is None


def test_the_bound_is_what_the_busiest_link_carries() -> None:
    record = cell(100_000_000)
    assert ratios.bound_s(record, 1e9) == pytest.approx(1.2)
    assert ratios.over_bound(record, 1e9) == pytest.approx(5.0)
    assert ratios.over_bound(record, None) is None


def test_what_a_token_bucket_spares_is_told() -> None:
    short = cell(one_bit_s=0.01)  # 1 ms of a Gbit/s is in the bucket, and less than that was sent
    short["timings"]["one-bit ring"]["cost"]["bytes_sent"] = 47_000.0
    assert ratios.bucket_share(short) == pytest.approx(8 * 47_000 / 1e9 / 0.01)
    short["timings"]["one-bit ring"]["cost"]["bytes_sent"] = 1e9
    assert ratios.bucket_share(short) == pytest.approx(0.1)
    short["timings"]["one-bit ring"]["median_s"] = 0.005
    assert "1MB †" in tables([short])["cluster-sizes"]
    assert ratios.bucket_share(cell(rate="none")) == 0


def test_the_break_even_point_lies_between_the_logarithms() -> None:
    assert ratios.find_crossing([(100.0, 10.0), (10_000.0, 0.1)]) == pytest.approx(1000)
    assert ratios.find_crossing([(10_000.0, 0.1), (100.0, 10.0)]) == pytest.approx(1000)
    assert ratios.find_crossing([(1.0, 4.0), (10.0, 0.5), (100.0, 2.0), (1000.0, 0.5)]) == pytest.approx(100 * 10**0.5)
    assert ratios.find_crossing([(1.0, 4.0), (10.0, 2.0)]) is None
    assert ratios.find_crossing([(1.0, 0.5), (10.0, 2.0)]) is None
    assert ratios.find_crossing([]) is None


def test_the_balanced_rate_is_one_that_can_be_asked_for() -> None:
    slow, fast = overlap_record(2, 1000), overlap_record(2, 4000)
    for record, payload, wire_s in ((slow, 0.956e9, 0.04), (fast, 3.824e9, 0.01)):
        record["links"][0]["bits_per_s"], record["wire_s"] = payload, wire_s
    assert balance([slow, fast]) == 2000
    # memory that gave more for a while does not move it
    lucky = overlap_record(2, 3000) | {"compute_s": 0.011, "wire_s": 0.0125}
    assert balance([slow, fast, lucky]) == pytest.approx(2000, rel=0.15)
    assert balance([slow]) is balance([]) is None


def test_overlap_is_the_hidden_part_of_the_shorter() -> None:
    assert overlap.overlap(4.0, 1.0, 4.0) == 1
    assert overlap.overlap(1.0, 4.0, 5.0) == 0
    assert overlap.overlap(2.0, 2.0, 3.0) == 0.5
    assert overlap.overlap(2.0, 2.0, 5.0) == -0.5


def overlap_record(nodes: int, mbit: int) -> dict[str, Any]:
    times = {"wire_s": 30.0 / mbit, "compute_s": 0.02, "both_s": 0.04}
    links = [{"what": "", "asked": "", "bits_per_s": mbit * 0.95e6}]
    settings = {"nodes": nodes, "rate": f"{mbit}mbit", "between": "none"}
    head = {"part": "overlap", "n": 1_000_000, "environment": ENVIRONMENT, "links": links, "settings": settings}
    return {**head, **times, "overlap": 0.5, "overlaps": [0.4, 0.5, 0.8], "exposed_s": 0.001, "moving_s": 0.003}


def test_several_jobs_overlap_as_the_median_of_theirs() -> None:
    jobs = [
        overlap_record(2, 1000) | {"overlap": part, "wire_s": wire_s, "times_s": {}}
        for part, wire_s in ((0.9, 3.0), (0.5, 1.0), (0.7, 2.0))
    ]
    for job, scaling, rate in zip(jobs, (1.1, 1.9, 1.5), (9e8, 9.2e8, 9.9e8), strict=True):
        job["environment"] = job["environment"] | {"memory_scaling": [scaling]}
        job["links"][0]["bits_per_s"] = rate
    made = overlap.merge_jobs(jobs)
    assert (made["overlap"], made["wire_s"], made["overlaps"]) == (0.7, 2.0, [0.9, 0.5, 0.7])
    assert ratios.payload_rate(made) == 9.2e8
    text = overlap_table([made])
    assert "| 70% (50 to 90%) |" in text
    assert "All processors at once read memory 1.1 to 1.9 times as fast as one." in text


def test_overlap_goes_on_with_the_jobs_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    broken = True

    def measure_alone(part: str, cluster: Cluster, path: Path, ranks: int, **arguments: Any) -> dict[str, Any]:
        assert (part, ranks, arguments) == ("overlap", 1, {"n": overlap.N, "repeats": overlap.REPEATS})
        asked.append(path.name)
        if cluster.rate == "1gbit" and broken:
            raise ClusterError("a link is slow")
        record = overlap_record(cluster.nodes, 1000) | {"times_s": {}}
        write_record(path, record)
        return record

    monkeypatch.setattr(driver, "measure_alone", measure_alone)
    monkeypatch.setattr(driver, "log", lambda text: None)
    monkeypatch.setattr(overlap, "JOBS", 2)
    names, folder = {Cluster(2, "1gbit"): "one", Cluster(2, "2gbit"): "two"}, tmp_path / "overlap"
    measurement = replace(overlap.MEASUREMENT, jobs=lambda records: overlap._turns(names), turns=2)
    failed = driver.measure_missing(measurement, tmp_path, False)
    assert failed == [f"one, job {job}: a link is slow" for job in (1, 2)]
    assert [path.name for path in folder.glob("*.json")] == ["two.json"]
    assert asked == ["one.0.json", "two.0.json", "one.1.json", "two.1.json"]
    broken, asked[:] = False, ["before"]
    write_record(folder / "parts" / "one.0.json", overlap_record(2, 1000) | {"times_s": {}})
    assert driver.measure_missing(measurement, tmp_path, False) == []
    assert asked == ["before", "one.1.json"]
    assert len(json.loads((folder / "one.json").read_text())["overlaps"]) == 2
    assert not list((folder / "parts").iterdir())
    assert driver.measure_missing(measurement, tmp_path, True) == []
    assert asked[2:] == ["one.0.json", "two.0.json", "one.1.json", "two.1.json"]


def grid_of_records() -> list[dict[str, Any]]:
    found = [
        cell(nbytes, rate, one_bit_s)
        for rate, one_bit_s in (("100mbit", 0.5), ("1gbit", 2.0), ("none", 8.0))
        for nbytes in (4_000, 16_000_000, 100_000_000)
    ]
    other = cell()
    other["settings"] = Cell(Cluster(8, "1gbit", "100mbit"), 16_000_000).settings
    return [*found, other]


def test_a_star_of_many_nodes_is_listed_as_left_out() -> None:
    (many,) = product((8,), ("1gbit",), ("64kB",))
    kept, left_out = choose(of_library("openmpi", 8), many, budget_s=20, longest_s=15)
    assert "one-bit star" not in {way.name for way in kept}
    text = tables([cell() | {"settings": many.settings, "left_out": left_out}])["cluster-left-out"]
    assert "| 8 | 1gbit | 64kB | one-bit star | more than 4 nodes, and its centre sends to each of the others |" in text


def test_tables_name_the_best_algorithm_and_what_was_left_out() -> None:
    made = tables(grid_of_records())
    row = next(line for line in made["cluster-sizes"].splitlines() if line.startswith("| 100MB | 500"))
    cells = [text.strip() for text in row.strip("|").split("|")]
    assert cells[5:7] == ["4000 (4000) / 2000 Rabenseifner", "7000 (7000) / 3500"]
    assert cells[-4:] == ["MPI Rabenseifner", "8.00", "2.00", "1.96"]
    assert "| 8 | 1gbit/100mbit | 16MB |" in made["cluster-nodes"]
    assert "| 4 | 1gbit | 100MB | dense auto | no time |" in made["cluster-left-out"]
    assert "| 4.50 |" in made["cluster-mpich"]
    four = "| 4 | 1000mbit | 950 Mbit/s | 30.0 | 20.0 | 40.0 | 50% (40 to 80%) | 1.00 | 3.00 |"
    assert four in overlap_table([overlap_record(2, 1000), overlap_record(4, 1000)])
    assert "1gbit/100mbit" not in made["cluster-bound"]
    assert "6000 (6000) / 3000 | 1200 | 5.00 | 1263 | 4.75 |" in made["cluster-bound"]
    for name in ("MPI Rabenseifner (best of Open MPI)", "MPI ring", "MPICH"):
        assert f"\n| {name} | " in made["cluster-cost"]
    assert "| 4 | 1gbit | 1MB" in tables([cell()])["cluster-topologies"]


def test_tables_stay_as_they_are_where_what_they_are_made_of_is_not_measured(tmp_path: Path) -> None:
    document = tmp_path / "docs.md"
    document.write_text(program.DOCUMENT.read_text())
    options = program._parser().parse_args(["--docs", str(document), "--figures", str(tmp_path / "figures")])
    program.write(tmp_path / "records", options)
    assert document.read_text() == program.DOCUMENT.read_text()

    write_record(tmp_path / "records" / "overlap" / "a.json", overlap_record(2, 500))
    program.write(tmp_path / "records", options)
    blocks = re.compile(r"<!-- begin (\S+) -->(.*?)<!-- end", re.DOTALL)
    before, after = (dict(blocks.findall(path.read_text())) for path in (program.DOCUMENT, document))
    assert {name for name in before if before[name] != after[name]} == {"cluster-overlap"}

    eight = cell()
    eight["settings"] = Cell(Cluster(8, "1gbit"), 100_000_000).settings
    write_record(tmp_path / "records" / "b.json", eight)
    program.write(tmp_path / "records", options)
    blocks_now = dict(blocks.findall(document.read_text()))
    assert blocks_now["cluster-nodes"] != before["cluster-nodes"]
    assert blocks_now["cluster-sizes"] == before["cluster-sizes"]  # of four nodes


def test_figures_are_shown_with_a_text_for_readers_who_do_not_see_them(tmp_path: Path) -> None:
    shown = program.figures([tmp_path / "figures" / "cluster-training.png"], tmp_path)
    assert shown == f"![{program.CAPTIONS['cluster-training']}](figures/cluster-training.png)"
    assert program.figures([], tmp_path) == NOTHING
