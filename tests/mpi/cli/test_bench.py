"""`mpicomp bench` under mpirun: one report, one status, and checks that notice wrong results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, LinkModel, Traffic
from collectives.group import opening
from mpicomp.aggregator.base import Aggregator
from mpicomp.cli.bench.measure import Subject, measure
from mpicomp.cli.main import main
from tests.mpi.lanes import up_to_two_ranks

WORLD = MPI.COMM_WORLD
QUICK = ("--repeats", "2", "--warmup", "0")
PROMISED = {
    "algorithm", "topology", "ranks", "count", "seconds", "p99_seconds", "bytes_sent_per_rank", "messages_per_rank",
    "bits_per_element", "baseline", "baseline_seconds", "speedup", "dtype", "options", "mpi_library", "hosts",
    "encoding_seconds", "merging_seconds", "decoding_seconds", "waiting_seconds",
}  # fmt: skip


def bench(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the command; the exit status, and rank 0's last line of JSON."""
    status = main(["bench", *QUICK, *arguments, "--json", str(tmp_path / "bench.json")])
    text = (tmp_path / "bench.json").read_text() if WORLD.rank == 0 else ""
    return status, json.loads(WORLD.bcast(text).splitlines()[-1])


@up_to_two_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("arguments", "bits"),
    [
        (("--algorithm", "marsit", "--option", "full_precision_every=None"), 1.0),
        (("--algorithm", "marsit", "--option", "full_precision_every=1"), 32.0),
        (("--algorithm", "dense"), 32.0),
        (("--algorithm", "dense", "--option", "wire=float16"), 16.0),
        (("--algorithm", "dense", "--option", "wire=bfloat16", "--dtype", "float64"), 16.0),
        (("--algorithm", "allreduce"), 32.0),
        (("--algorithm", "cascading-ssdm", "--baseline", "dense"), 1.0),
    ],
)
def test_every_method_is_found_correct_and_its_bits_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], bits: float
) -> None:
    status, line = bench(tmp_path, "--count", "4e5", "--topology", "ring", *arguments)
    printed = capsys.readouterr().out
    assert status == 0, line["check"]
    assert set(line) >= PROMISED
    assert line["bits_per_element"] == pytest.approx(bits, rel=0.02)
    assert line["speedup"] == pytest.approx(line["baseline_seconds"] / line["seconds"])
    assert bool(printed) == (WORLD.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_the_long_run_counts_the_bytes_of_all_ranks(tmp_path: Path) -> None:
    """The middle of a star sends more than the others."""
    status, line = bench(tmp_path, "--count", "1e5", "--topology", "star", "--algorithm", "marsit")
    assert status == 0, line["check"]
    assert line["bits_per_element_long_run"] == pytest.approx(0.99 + 0.32, rel=0.03)


def test_auto_goes_by_the_network_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = []
    agree = opening.agree_on_network

    def agree_and_note(*arguments: Any) -> LinkModel | None:
        known.append(agree(*arguments))
        return known[-1]

    monkeypatch.setattr(opening, "agree_on_network", agree_and_note)
    network = LinkModel(1e-3, 1e7)
    network.save(tmp_path / "network.json")
    status, _ = bench(tmp_path, "--count", "1e3", "--network", str(tmp_path / "network.json"))
    assert status == 0
    assert network in known
    assert main(["bench", *QUICK, "--network", str(tmp_path / "none.json")]) == 2
    assert ("--topology auto --network" in capsys.readouterr().err) == (WORLD.rank == 0)


@up_to_two_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("residual=paper",),
        ("compensation=False",),
        ("gamma=auto", "clip=0.25"),
        ("winners=1",),
        ("winners=2",),
        ("winners=2", "compensation=False"),
    ],
)
def test_marsit_keeps_its_promises_in_every_form(tmp_path: Path, dtype: str, options: tuple[str, ...]) -> None:
    chosen = [part for option in (*options, "full_precision_every=3") for part in ("--option", option)]
    status, line = bench(tmp_path, "--count", "1e4", "--dtype", dtype, *chosen)
    assert status == 0, line["check"]


def spoil(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any, np.ndarray], None]) -> None:
    """Let every aggregator damage its results."""
    honest = Aggregator.aggregate

    def aggregate(self: Aggregator, vector: Any, out: Any = None) -> Any:
        result = honest(self, vector, out)
        damage(self, result)
        return result

    monkeypatch.setattr(Aggregator, "aggregate", aggregate)


def times(factor: float, place: Any = slice(None)) -> Callable[[Any, np.ndarray], None]:
    def damage(_: Any, result: np.ndarray) -> None:
        result[place] *= factor

    return damage


one_rank_differs = times(-1 if WORLD.rank == WORLD.size - 1 else 1, 7)
flip_the_signs, double, one_magnitude_differs = times(-1), times(2), times(1.5, 5000)


def prefer_positive(_: Any, result: np.ndarray) -> None:
    """Wins every vote that is not unanimous: no single element gives it away."""
    votes = np.sign(np.random.default_rng((0, WORLD.rank)).standard_normal(result.size, np.float32))
    total = np.empty_like(votes)
    WORLD.Allreduce(votes, total)
    result[np.abs(total) < WORLD.size] = np.abs(result[0])


def a_residual_is_left(aggregator: Any, _: np.ndarray) -> None:
    aggregator.residual[3] += 1


ONE_BIT = ("--option", "full_precision_every=None")
STATELESS = (*ONE_BIT, "--option", "compensation=False")


@up_to_two_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("arguments", "damage", "verdict"),
    [
        (("--algorithm", "dense"), double, "the exact result is"),
        (("--algorithm", "cascading-ssdm"), one_rank_differs, "another result than rank 0"),
        (ONE_BIT, one_rank_differs, "another result than rank 0"),
        (ONE_BIT, flip_the_signs, "another sign than all ranks voted for"),
        (ONE_BIT, double, "the global step is"),
        (ONE_BIT, one_magnitude_differs, "do not all have the magnitude"),
        ((*ONE_BIT, "--option", "winners=2"), flip_the_signs, "another sign than all ranks voted for"),
        ((*ONE_BIT, "--option", "winners=2"), double, "the global step is"),
        (STATELESS, prefer_positive, "the votes lead to expect"),
        (("--option", "full_precision_every=1"), a_residual_is_left, "left a residual"),
        (("--option", "full_precision_every=1"), double, "the exact result is"),
    ],
)
def test_a_wrong_result_is_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    damage: Callable[[Any, np.ndarray], None],
    verdict: str,
) -> None:
    spoil(monkeypatch, damage)
    status, line = bench(tmp_path, "--count", "1e4", *arguments)
    assert status == 1
    assert verdict in line["check"]


PER_NODE = ("--per-node", "--ranks-per-node", "2")


@pytest.mark.mpi(min_size=3, max_size=4)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        ("--option", "full_precision_every=3"),
        ("--option", "full_precision_every=None", "--option", "winners=2"),
        ("--algorithm", "dense"),
        ("--algorithm", "qsgd"),
    ],
    ids=" ".join,
)
def test_methods_between_nodes_are_found_correct(tmp_path: Path, dtype: str, options: tuple[str, ...]) -> None:
    status, line = bench(tmp_path, "--count", "1e4", "--dtype", dtype, *PER_NODE, *options)
    assert status == 0, line["check"]
    assert line["nodes"] == {3: [2, 1], 4: [2, 2]}[WORLD.size]
    assert line["bytes_sent_per_node"] == pytest.approx(line["bytes_sent_per_rank"] * WORLD.size / 2)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("local", ["shared", "ring"])
def test_the_only_node_has_the_exact_mean(tmp_path: Path, local: str) -> None:
    status, line = bench(tmp_path, "--count", "1e4", "--per-node", local)
    assert status == 0, line["check"]
    assert (line["per_node"], line["nodes"]) == (local, [2])


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(
    ("arguments", "damage", "verdict"),
    [
        (ONE_BIT, one_rank_differs, "another result than rank 0"),
        (ONE_BIT, flip_the_signs, "another sign than all ranks voted for"),
        (("--option", "full_precision_every=1"), double, "the exact result is"),
    ],
)
def test_a_wrong_result_between_nodes_is_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    damage: Callable[[Any, np.ndarray], None],
    verdict: str,
) -> None:
    spoil(monkeypatch, damage)
    status, line = bench(tmp_path, "--count", "1e4", *PER_NODE, *arguments)
    assert status == 1
    assert verdict in line["check"]


@pytest.mark.mpi(min_size=2)
def test_unchecked_results_are_not_called_right(tmp_path: Path) -> None:
    status, line = bench(tmp_path, "--count", "100", "--no-check", "--baseline", "none")
    assert status == 0
    assert line["check"] is line["speedup"] is None


def test_bad_arguments_end_every_rank_and_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--count", "100", "--json", "/nowhere/bench.json"]) == 2
    assert main(["bench", "--count", "none"]) == 2
    assert main(["bench", "--count", "9", "--option", "seed=half"]) == 2
    assert capsys.readouterr().err.count("error:") == (3 if WORLD.rank == 0 else 0)


def test_a_full_disk_is_told_once_and_ends_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *QUICK, "--count", "100", "--json", "/dev/full"]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    cause = "rank 0, --json /dev/full: No space left on device; make room there, or name another file"
    assert told == ([f"mpicomp bench: error: {cause}"] if WORLD.rank == 0 else [])


@pytest.mark.mpi(min_size=2)
def test_the_slowest_rank_counts(mpi_comm: MPI.Intracomm) -> None:
    def slow_on_the_last_rank(x: np.ndarray, out: np.ndarray) -> None:
        time.sleep(0.06 if comm.rank == comm.size - 1 else 0.0)

    x = np.zeros(1)
    with Communicator(mpi_comm) as comm:
        measured = measure(comm, Subject(slow_on_the_last_rank, Traffic()), None, x, x, repeats=2, warmup=3)
    assert measured.seconds.shape == (2,)
    assert (measured.seconds >= 0.05).all()
