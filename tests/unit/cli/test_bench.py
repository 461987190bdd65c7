"""Arguments and columns of `mpicomp bench`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mpicomp.cli.arguments import assignment, counts
from mpicomp.cli.bench.measure import Measurement
from mpicomp.cli.bench.report import bits_per_element, footing, record
from mpicomp.cli.main import main


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25e6", (25_000_000,)),
        ("1e3,1e6", (1000, 1_000_000)),
        ("1e3:1e6:10", (1000, 10_000, 100_000, 1_000_000)),
        ("4:20", (4, 8, 16)),
        ("2:4:1.1", (2, 3, 4)),
        ("7:7:2,9", (7, 9)),
    ],
)
def test_counts_are_lists_and_ranges(text: str, expected: tuple[int, ...]) -> None:
    assert counts(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "1.5", "-4", "inf", "nan", "ten", "1:8:1", "1:8:0.5", "8:1:2", "1:2:3:4", "1:1e9:1.0001"]
)
def test_a_count_that_makes_no_sense_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="--count"):
        counts(text)


def test_option_values_are_numbers_truth_values_none_or_strings() -> None:
    assert assignment("full-precision-every=None") == ("full_precision_every", None)
    assert assignment("residual=paper") == ("residual", "paper")
    assert assignment("clip=0.5") == ("clip", 0.5)
    assert assignment("clip=inf") == ("clip", math.inf)
    assert assignment("seed={1}") == ("seed", "{1}")


def test_float32_costs_32_bits_an_element_and_phase_on_any_number_of_ranks() -> None:
    for ranks in (2, 3, 8):
        assert bits_per_element(2 * (ranks - 1) * 4_000_000 / ranks, 1_000_000, ranks) == pytest.approx(32)
    assert bits_per_element(0, 10, 1) is None


def line_of(sent: float, dense: dict[str, int]) -> dict[str, object]:
    common = {"ranks": 2, "nodes": [1, 1], "dtype": "float32"}
    cost = {"bytes_sent": sent, "messages": 2.0}
    cost |= {f"seconds_{name}": 0.0 for name in ("encoding", "merging", "decoding", "waiting", "total")}
    measured = Measurement(np.array([1.0, 3.0, 2.0, 2.0]), np.array([4.0, 4.0, 6.0, 2.0]), cost)
    return record(common, 800, measured, "", dense)


@pytest.mark.parametrize("calls", [0, 2])
def test_the_long_run_counts_full_precision_rounds_whether_or_not_they_were_timed(calls: int) -> None:
    one_bit, full = 100, 3200
    sent = (calls * full + (4 - calls) * one_bit) / 4
    line = line_of(sent, {"every": 100, "bytes": full, "calls": calls})
    assert line["bits_per_element_long_run"] == pytest.approx(1.31)


def test_one_line_below_the_table_tells_of_full_precision() -> None:
    row = {"bits_per_element_long_run": 1.31, "full_precision_calls": 0, "repeats": 20}
    text = "# every 100th call is in full precision; "
    assert footing([row, row], 100) == [text + "0 of the 40 timed calls were; in the long run 1.31 bits/el"]
    other = {"bits_per_element_long_run": 1.456, "full_precision_calls": 1, "repeats": 20}
    assert footing([row, other], 100) == [text + "1 of the 40 timed calls was; in the long run 1.31 to 1.46 bits/el"]
    assert footing([row], None) == footing([row], 1) == []


def test_speed_up_is_the_ratio_of_the_medians() -> None:
    line = line_of(100, {})
    assert (line["seconds"], line["baseline_seconds"], line["speedup"]) == (2.0, 4.0, 2.0)
    assert line["check"] == "ok"


def test_one_process_needs_no_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "--count", "1e2,1e3", "--repeats", "2", "--json", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["count"] for line in lines] == [100, 1000]
    assert {line["check"] for line in lines} == {"ok"}
    assert capsys.readouterr().out.count(" ok\n") == 2


@pytest.mark.parametrize("method", ["marsit", "qsgd", "dense"])
def test_per_node_on_one_rank_is_checked_as_the_method_itself(method: str) -> None:
    assert main(["bench", "--count", "10", "--repeats", "1", "--method", method, "--per-node"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--method", "nothing"],
        ["--topology", "nothing"],
        ["--option", "clip"],
        ["--option", "clip=-1"],
        ["--option", "colour=red"],
        ["--algorithm", "allreduce", "--option", "clip=1"],
        ["--per-node", "cloud"],
        ["--ranks-per-node", "0"],
        ["--algorithm", "allreduce", "--per-node", "ring"],
        ["--baseline", "gloo"],
        ["--dtype", "int8"],
        ["--device", "tpu"],
        ["--repeats", "0"],
        ["--warmup", "x"],
        ["--timeout", "-1"],
        ["--timeout", "soon"],
        ["--option", "seed=half"],
        ["--json", "/nowhere/bench.json"],
        ["--count", "1e17"],
        ["--minutes", "3"],
    ],
)
def test_arguments_that_cannot_be_used_end_in_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--count", "100", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mpicomp bench: error: ")
    assert error.count("\n") == 1
    assert arguments[-1].split("=")[0] in error or arguments[-2] in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "--algoritm", "marsit"], "unrecognized arguments: --algoritm marsit (did you mean '--algorithm'?)"),
        (["bench", "--metod", "marsit"], "unrecognized arguments: --metod marsit (did you mean '--method'?)"),
        (["bench", "--coutn=5"], "unrecognized arguments: --coutn=5 (did you mean '--count'?)"),
        (["advise", "--topolgy", "ring"], "unrecognized arguments: --topolgy ring"),
        (
            ["benhc"],
            "there is no command 'benhc' (did you mean 'bench'?): choose one of demo, run, doctor, warm, bench",
        ),
        (["trian"], "'trian' (to train, start your own script: mpicomp run -n 4 train.py): choose one of"),
        (["bench", "--algorithm", "marsti"], "--method marsti (did you mean 'marsit'?): choose one of dense"),
        (["bench", "--topology", "rng"], "there is no topology 'rng' (did you mean 'ring'?)"),
        (["bench", "--dtype", "float33"], "--dtype float33 (did you mean 'float32'?)"),
        (["bench", "--option", "full_precision_evry=3"], "has no option 'full_precision_evry' (did you mean 'full_pre"),
    ],
)
def test_a_misspelt_name_is_reported_with_the_nearest_one(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert told in capsys.readouterr().err
