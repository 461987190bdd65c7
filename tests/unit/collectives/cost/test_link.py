"""A network is a few numbers, in a file or not, and determines which topology is fastest."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.faults.full_disk import full_disk
from collectives import Communicator, HalvingDoubling, Ring, Torus
from collectives.cost.link import ComputeModel, LinkModel
from collectives.cost.simulate import simulate_time
from collectives.group.opening import agree_on_network
from collectives.group.routes import fastest
from collectives.threads.run_local import run_local
from tests.mutations import HUGE, mutants

TWO_LEVEL = LinkModel(1e-5, 1e9, group_size=4, between_latency_s=1e-4, uplink_bytes_s=1e7)


def test_a_network_survives_its_file(tmp_path: Path) -> None:
    for network in (TWO_LEVEL, LinkModel(0, 1)):
        network.save(tmp_path / "network.json")
        assert LinkModel.load(tmp_path / "network.json") == network


def test_a_full_disk_is_named_and_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    TWO_LEVEL.save(path)
    with full_disk(), pytest.raises(OSError, match=r"cannot be written \(No space left .*make room .*network.json"):
        LinkModel(0, 1).save(path)
    assert LinkModel.load(path) == TWO_LEVEL


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "is not JSON"),
        (" " * (1 << 20) + "{}", "longer than 1048576 bytes"),
        ("[]", r"it is \[\], not an object"),
        ('{"latency_s": 1}', "it has no 'bandwidth_bytes_s'"),
        ('{"latency_s": 1, "bandwidth_bytes_s": 1, "colour": 3}', "'colour' is none of"),
        ('{"latency_s": "1", "bandwidth_bytes_s": 1}', "its 'latency_s' is '1', not a number"),
        ('{"latency_s": 1, "bandwidth_bytes_s": null}', "its 'bandwidth_bytes_s' is None, not a number"),
        ('{"latency_s": 1, "bandwidth_bytes_s": true}', "its 'bandwidth_bytes_s' is True, not a number"),
        ('{"latency_s": 1, "bandwidth_bytes_s": -5}', "must be a finite number above 0, not -5"),
        ('{"latency_s": 1, "bandwidth_bytes_s": 1' + "0" * 400 + "}", "more than 18 digits"),
        ('{"latency_s": NaN, "bandwidth_bytes_s": 5}', "must be a finite number"),
    ],
)
def test_another_file_is_refused_by_name_with_the_cure(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=cause) as caught:
        LinkModel.load(path)
    assert str(path) in str(caught.value)
    assert "write it with mpicomp advise --save" in str(caught.value)
    assert "\n" not in str(caught.value)


FIELDS = ("latency_s", "bandwidth_bytes_s", "overhead_s", "group_size", "between_latency_s", "uplink_bytes_s")


@pytest.mark.parametrize(
    ("number", "fields"),  # which may have that value
    [
        *((wrong, ()) for wrong in (10**400, math.nan, math.inf, -1, "", "1", False, [1])),
        (None, ("group_size", "between_latency_s", "uplink_bytes_s")),
        (0, ("latency_s", "overhead_s", "between_latency_s")),
        *((no_size, tuple(field for field in FIELDS if field != "group_size")) for no_size in (10**19, 2.5, 2.0)),
    ],
)
def test_a_network_is_of_finite_numbers(number: Any, fields: tuple[str, ...]) -> None:
    for field in FIELDS:
        with nullcontext() if field in fields else pytest.raises(ValueError, match=f"^{field} must be"):
            LinkModel(**{"latency_s": 1, "bandwidth_bytes_s": 1, field: number})


def test_whatever_a_file_holds_it_is_a_network_or_one_line(tmp_path: Path) -> None:
    path, told = tmp_path / "network.json", []
    for text in mutants(asdict(TWO_LEVEL), 600):
        path.write_text(text)
        try:
            network = LinkModel.load(path)
        except ValueError as error:
            told.append(str(error))
        else:
            with np.errstate(all="ignore"):
                fastest(4, network, 57_344)(1000)
    assert 300 < len(told) < 600
    assert all(text.startswith(f"{path} ") and text.isprintable() for text in told)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"latency_s": 1, "bandwidth_bytes_s": ' + HUGE + "}", "{}", "\ud800"]
)
@pytest.mark.parametrize("bad", [0, 2])
def test_ranks_that_read_another_file_raise_the_same_error(tmp_path: Path, content: str, bad: int) -> None:
    TWO_LEVEL.save(tmp_path / "good.json")
    (tmp_path / "bad\n.json").write_text(content, errors="surrogatepass")

    def read(comm: Communicator) -> str:
        with pytest.raises(ValueError, match=f"^rank {bad} of 3: network=.*write it with mpicomp advise") as caught:
            agree_on_network(comm.mpi_comm, tmp_path / ("bad\n.json" if comm.rank == bad else "good.json"), 30)
        return str(caught.value)

    (told,) = set(run_local(3, read))
    assert "\n" not in told


def test_work_takes_no_negative_time() -> None:
    with pytest.raises(ValueError, match="negative"):
        ComputeModel(merge_s=-1e-9)
    with pytest.raises(ValueError, match="at least 1"):
        ComputeModel(sharing=0.5)


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
        return simulate_time(topology, 12, rounded, lambda n, weight: n, TWO_LEVEL, 57_344, alignment=8)

    chosen = seconds(fastest(12, TWO_LEVEL, 57_344)(nbytes))
    assert all(chosen <= seconds(other) for other in (Ring(), HalvingDoubling(), Torus(3, 4), Torus(4, 3)))
