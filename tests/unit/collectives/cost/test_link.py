"""A network is a few numbers, in a file or not, and tells which topology is fastest."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives import HalvingDoubling, Ring, Torus
from collectives.cost.link import LinkModel, Work
from collectives.cost.simulate import simulate_time
from collectives.planner import fastest

TWO_LEVEL = LinkModel(1e-5, 1e9, group_size=4, between_latency_s=1e-4, uplink_bytes_s=1e7)


def test_a_network_survives_its_file(tmp_path: Path) -> None:
    for network in (TWO_LEVEL, LinkModel(0, 1)):
        network.save(tmp_path / "network.json")
        assert LinkModel.load(tmp_path / "network.json") == network


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "is not JSON"),
        ("[]", "does not hold a network"),
        ('{"latency_s": 1}', "does not hold a network"),
        ('{"latency_s": 1, "bandwidth_bytes_s": 1, "colour": 3}', "does not hold a network"),
        ('{"latency_s": "1", "bandwidth_bytes_s": 1}', "must"),
        ('{"latency_s": 1, "bandwidth_bytes_s": null}', "must"),
        ('{"latency_s": 1, "bandwidth_bytes_s": -5}', "must"),
        ('{"latency_s": 1, "bandwidth_bytes_s": 5, "group_size": 2.5}', "must"),
        ('{"latency_s": 1, "bandwidth_bytes_s": 5, "group_size": 2.0}', "must"),
        ('{"latency_s": 1, "bandwidth_bytes_s": Infinity}', "must"),
        ('{"latency_s": NaN, "bandwidth_bytes_s": 5}', "must"),
    ],
)
def test_another_file_is_refused_by_name_with_the_cure(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=cause) as caught:
        LinkModel.load(path)
    assert str(path) in str(caught.value)
    assert "mpicomp advise --save" in str(caught.value)


def test_work_takes_no_negative_time() -> None:
    with pytest.raises(ValueError, match="negative"):
        Work(merge_s=-1e-9)
    with pytest.raises(ValueError, match="shared by 1"):
        Work(sharing=0.5)


def test_short_payloads_go_in_few_rounds_long_ones_spare_the_uplinks() -> None:
    choose = fastest(12, TWO_LEVEL, 57_344)
    assert isinstance(choose(64), HalvingDoubling)
    assert choose(1 << 24) == Torus(3, 4)
    alone = fastest(16, LinkModel(1e-5, 1e8), 57_344)
    assert isinstance(alone(64), HalvingDoubling)
    assert fastest(5, LinkModel(1e-5, 1e8), 57_344)(1 << 24) == Ring()


@pytest.mark.parametrize("nbytes", [1, 1000, 60_000, 1 << 20, 1 << 24])
def test_no_other_topology_would_be_faster(nbytes: int) -> None:
    def seconds(topology: object) -> float:
        rounded = 1 << (nbytes - 1).bit_length()
        return simulate_time(topology, 12, rounded, lambda n, weight: n, TWO_LEVEL, 57_344, alignment=8)  # type: ignore[arg-type]

    chosen = seconds(fastest(12, TWO_LEVEL, 57_344)(nbytes))
    assert all(chosen <= seconds(other) for other in (Ring(), HalvingDoubling(), Torus(3, 4), Torus(4, 3)))
