"""Scale on paper: one command simulates, remembers and draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apps.scale import plots
from apps.scale.__main__ import main
from apps.scale.simulations import LINES, METHODS, TOPOLOGIES, Point, powers, simulate
from collectives import LinkModel, Ring
from collectives.cost.simulate import simulate_time

NETWORK = LinkModel(2e-5, 1.25e9)


def test_one_command_makes_the_plots_and_does_not_simulate_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--most-ranks", "16", "--count", "1e6", "--json", str(tmp_path / "s.json"), "--out", str(tmp_path)]
    assert main([*arguments, "--processes", "1"]) == 0
    assert len(list(tmp_path.glob("scale-*.png"))) == 3
    known = (tmp_path / "s.json").read_text()
    assert len(json.loads(known)) >= 2 * len(LINES) * 2
    assert {json.loads(key)[1]["method"] for key in json.loads(known)} == set(METHODS)
    monkeypatch.setattr(Point, "seconds", None)
    assert main(arguments) == 0
    assert (tmp_path / "s.json").read_text() == known


def test_a_point_is_what_the_simulator_says(tmp_path: Path) -> None:
    point = Point("ring", "one-bit", 8, 4096 * 64, NETWORK)
    found = simulate([point], tmp_path / "s.json", 1)[point]
    assert found == point.seconds()
    bare = simulate_time(Ring(), 8, 4096 * 64, lambda n, weight: n // 8, NETWORK, 8 * 57_344)
    assert found > bare > 0
    fast, slow = (Point("torus", "dense", 4, 1000, LinkModel(1e-5, speed)) for speed in (1e9, 1e6))
    others = simulate([fast, slow], tmp_path / "s.json", 1)
    assert others[slow] > others[fast]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_compressing_is_faster_where_links_are_slow(name: str) -> None:
    network = LinkModel(1e-5, 1e8, group_size=4, between_latency_s=2e-5, uplink_bytes_s=1e7)
    dense, one_bit = (Point(name, method, 16, 1_000_000, network).seconds() for method in ("dense", "one-bit"))
    assert one_bit < dense / 10


@pytest.mark.parametrize("ranks", [4, 16])
def test_on_slow_links_one_winner_takes_half_of_the_time_of_merging_and_two_winners_take_as_long(ranks: int) -> None:
    slow = LinkModel(1e-6, 1e7)
    merged, one, two = (
        Point("ring", method, ranks, 2_000_000, slow).seconds() for method in ("one-bit", "one winner", "two winners")
    )
    assert one == pytest.approx(merged / 2, rel=0.15)
    assert two == pytest.approx(merged, rel=0.15)


def test_one_vector_is_decoded_once_however_many_ranks_send_parts_of_it() -> None:
    few, many = (Point("ring", "one winner", ranks, 8_000_000, LinkModel(0.0, 1e12)).seconds() for ranks in (4, 64))
    assert many < 1.2 * few


def test_ranks_go_up_in_powers() -> None:
    assert powers(4096) == [4, 16, 64, 256, 1024, 4096]
    assert powers(100) == [4, 16, 64]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rate", "none"], "--rate none"),
        (["--rate", "fast"], "fast"),
        (["--most-ranks", "2"], "at least 4"),
        (["--compute-ms", "0"], "not a positive number"),
        (["--batch", "1.5"], "whole number"),
    ],
)
def test_arguments_that_cannot_be_used_are_reported(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_titles_are_made_of_the_times() -> None:
    def at(topology: str, method: str, n: int) -> Point:
        return Point(topology, method, 64, n, NETWORK)

    times = {at(topology, method, 100): 0.5 for topology in TOPOLOGIES for method in ("dense", "one-bit")}
    times |= {at("torus", "dense", 100): 0.3, at("tree", "one-bit", 100): 0.1, at("ring", "one-bit", 100): 0.25}
    assert plots.times_title(NETWORK, 100, 64, times) == (
        "On 64 ranks, Marsit's all-reduce is 3 times as fast as dense over the best topology, 2.0 times over a ring"
    )
    model = plots.Model(200, 0.1, 32)
    times = {at("torus", "dense", 200): 0.3, at("torus", "one-bit", 200): 0.025}
    assert plots.throughput_title(model, NETWORK, 64, times) == (
        "64 processors train at 80 % of their ideal speed with Marsit over a torus, at 25 % with dense"
    )
    assert plots.split_title(NETWORK, model, (8, 32), 64, times) == (
        "On 64 processors, Marsit's step is 6.5 times as fast as dense with 8 samples a processor, 3.2 times with 32"
    )
