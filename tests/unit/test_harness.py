"""The lane runner keeps its promises: tried on small suites of its own, each run as a lane under mpirun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import run_lanes
from tests.conftest import Durations, first_cases, pytest_collection_modifyitems
from tests.run_lanes import FURTHER_LANES, HOME_LANES, PROJECT, TESTS, lanes_of, left_out
from tests.unit import conftest as unit_tests

pytestmark = pytest.mark.timeout(120)


class Item(NamedTuple):
    path: Path
    number: int
    limit: int | None


class Lane(NamedTuple):
    status: int
    output: str


def run_lane(folder: Path, n_ranks: int | str, body: str, *arguments: str) -> Lane:
    """Run `body` as a lane of its own; TimeoutExpired means that the lane did not end by itself."""
    (folder / "conftest.py").write_text("from tests.mpi.conftest import *\n")
    source = "import time\nimport pytest\nfrom mpi4py import MPI\n" + textwrap.dedent(body)
    (folder / "test_lane.py").write_text(source)
    command = [sys.executable, str(PROJECT / "tests" / "run_lanes.py"), "--ranks", str(n_ranks), "--tests", str(folder)]
    done = subprocess.run(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False
    )
    return Lane(done.returncode, done.stdout)


def test_limits_of_tests_grow_on_a_busy_machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    for load, ci, expected in ((10.0, "", 120), (40.0, "", 4 * 120), (40.0, "1", 4 * 120), (1.0, "1", 3 * 120)):
        monkeypatch.setenv("CI", ci)
        item = pytest.Function.from_parent(request.node.parent, name=request.node.name)
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        pytest_collection_modifyitems(request.config, [item])
        mark = item.get_closest_marker("timeout")
        assert mark is not None
        assert mark.args == (expected,)


def test_each_process_begins_with_files_of_long_tests() -> None:
    each: dict[str, list[int | None]] = {
        "a": [None, 300],
        "b": [None] * 8,
        "c": [600, 100],
        "d": [240],
        "e": [None] * 3,
    }
    items: list[Any] = [Item(Path(file), number, limit) for file in each for number, limit in enumerate(each[file])]
    ordered = unit_tests.in_shares(items, {one: one.limit for one in items if one.limit is not None}, 2)
    assert "".join(str(one.path) for one in ordered) == "ccd" + "abbbb" + "a" + "bbbbeee"
    assert sorted(ordered, key=items.index) == items


def test_a_lane_passes_and_only_rank_0_prints(tmp_path: Path) -> None:
    lane = run_lane(
        tmp_path,
        3,
        """
        def test_all(mpi_comm):
            assert mpi_comm.allreduce(1) == 3

        @pytest.mark.parametrize("mpi_comm", [2, 5], indirect=True)
        def test_part(mpi_comm):
            assert mpi_comm.allreduce(1) == 2 and MPI.COMM_WORLD.rank < 2

        @pytest.mark.mpi(min_size=4)
        def test_too_large_for_this_lane(mpi_comm):
            raise AssertionError
        """,
    )
    assert lane.status == 0, lane.output
    assert lane.output.count("2 passed, 2 deselected") == 1, lane.output


def test_lanes_at_one_time_print_one_after_the_other_and_report_those_that_fail(tmp_path: Path) -> None:
    lane = run_lane(
        tmp_path,
        "3,1,2",
        """
        def test_all(mpi_comm):
            time.sleep(mpi_comm.size / 2)
            assert mpi_comm.size != 1
        """,
        "--at-once",
        "2",
    )
    assert lane.status == 1, lane.output
    blocks = re.findall(r"1 (passed|failed) .*?=== (\d) ranks: exit (\d)", lane.output, re.DOTALL)
    assert sorted(blocks) == [("failed", "1", "1"), ("passed", "2", "0"), ("passed", "3", "0")], lane.output
    assert "lanes that failed: 1 ranks (exit 1)" in lane.output


def test_a_lane_of_all_tests_leaves_out_files_without_tests_of_its_own() -> None:
    assert left_out(3) == []
    files = sorted(TESTS.rglob("test_*.py"))
    for marker, lane in FURTHER_LANES.items():
        assert not [path for path in files if marker in path.read_text() and f"--ignore={path}" in left_out(lane)]
    for lane in (1, 2, 4, 8):
        assert len(files) / 2 < len(left_out(lane)) < len(files)


def test_the_first_lane_refuses_a_test_of_another_lane_in_a_file_that_is_left_out_there(tmp_path: Path) -> None:
    body = """
        @pytest.mark.mpi(min_size=2 * 2)
        def test_it(): pass
        """
    lane = run_lane(tmp_path, 3, body, "--once")
    assert lane.status == 1, lane.output
    assert "test_it is a test of 4 ranks in a file without any of WORDS[4] of run_lanes.py" in lane.output


@pytest.mark.parametrize(
    ("marker", "least", "most", "lanes"),
    [
        ("", 1, 8, {3}),
        ("", 1, 2, {2}),
        ("", 1, 1, {1}),
        ("", 4, 8, {4}),
        ("", 5, 8, {8}),
        ("alone_too", 1, 8, {1, 3}),
        ("alone_too", 2, 8, {3}),
        ("eight_too", 1, 8, {3, 8}),
        ("every_size", 2, 8, {3, 8}),
        ("every_size", 1, 3, {3}),
    ],
)
def test_a_run_of_all_tests_runs_each_in_its_lanes(marker: str, least: int, most: int, lanes: set[int]) -> None:
    assert lanes_of(lambda n_ranks: least <= n_ranks <= most, {marker}) == lanes
    assert set(HOME_LANES) == {1, 2, 3, 4, 8}


def test_a_lane_leaves_out_tests_of_other_lanes(tmp_path: Path) -> None:
    body = """
        def test_all(mpi_comm):
            pass

        @pytest.mark.alone_too
        def test_alone_too(mpi_comm):
            pass

        @pytest.mark.mpi(max_size=2)
        def test_few(mpi_comm):
            pass

        @pytest.mark.parametrize("mpi_comm", [2, 4], indirect=True)
        def test_part(mpi_comm):
            pass
    """
    output = run_lane(tmp_path, "1,2,3", body, "--once").output
    found = [re.findall(r"(\d passed(?:, \d deselected)?)", part) for part in output.split(" ranks ===\n")]
    assert found == [[], ["1 passed, 4 deselected"], ["1 passed, 4 deselected"], ["3 passed, 2 deselected"]], output


def test_one_rank_failing_fails_all_and_is_named(tmp_path: Path) -> None:
    lane = run_lane(
        tmp_path,
        3,
        """
        def test_odd_rank(mpi_comm):
            print("said by", mpi_comm.rank)
            assert mpi_comm.rank != 1, "the odd one"

        def test_after_it(mpi_comm):
            assert mpi_comm.allreduce(1) == 3

        def test_skip():
            if MPI.COMM_WORLD.rank == 2:
                pytest.skip("not today")
        """,
    )
    assert lane.status == 1, lane.output
    assert "rank 1 of 3: AssertionError: the odd one" in lane.output, lane.output
    assert "said by 1" in lane.output
    assert "said by 0" not in lane.output
    assert "skipped on rank 2 of 3" in lane.output
    assert "2 failed, 1 passed" in lane.output


def test_a_deadlock_ends_in_seconds_with_every_ranks_stack(tmp_path: Path) -> None:
    lane = run_lane(
        tmp_path,
        2,
        """
        @pytest.mark.timeout(2)
        def test_deadlock(mpi_comm):
            mpi_comm.recv(source=1 - mpi_comm.rank)
        """,
    )
    assert lane.status != 0
    for rank in range(2):
        assert f'[rank {rank} of 2]   File "{tmp_path}/test_lane.py", line 7 in test_deadlock' in lane.output, (
            lane.output
        )


def test_a_rank_that_fails_while_others_wait_for_it_is_the_one_reported(tmp_path: Path) -> None:
    lane = run_lane(
        tmp_path,
        2,
        """
        def test_left_alone(mpi_comm):
            assert mpi_comm.rank == 0, "left early"
            mpi_comm.barrier()
        """,
    )
    assert lane.status != 0
    assert "AssertionError: left early" in lane.output, lane.output
    assert "line 7 in test_left_alone" in lane.output


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@pytest.mark.mpi(minsize=2)\ndef test_it(): pass", "does not take minsize"),
        ("@pytest.mark.skip('later')\ndef test_it(): pass", "skipped on rank 0"),
        ("@pytest.mark.mpi(min_size=3)\ndef test_it(): pass", "1 deselected"),
        ("import no_such_module\ndef test_it(): pass", "no_such_module"),
    ],
    ids=["misspelt marker", "all skipped", "none fits", "import error"],
)
def test_a_lane_without_tests_fails(tmp_path: Path, body: str, message: str) -> None:
    lane = run_lane(tmp_path, 1, body)
    assert lane.status == 1, lane.output
    assert message in lane.output, lane.output


def test_a_lane_that_hangs_outside_a_test_is_ended(tmp_path: Path) -> None:
    lane = run_lane(tmp_path, 1, "time.sleep(1000)", "--lane-timeout", "3")
    assert lane.status == 1


def test_a_python_without_mpirun_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run_lanes, "environment", lambda: {"PATH": str(tmp_path)})
    with pytest.raises(SystemExit, match="2"):
        run_lanes.main(["--ranks", "2"])
    assert f"there is no mpirun for {sys.executable}" in capsys.readouterr().err


def test_first_cases_are_those_of_each_test_of_a_folder(request: pytest.FixtureRequest) -> None:
    def items(folder: str) -> list[pytest.Item]:
        module = pytest.Module.from_parent(request.session, path=PROJECT / "tests" / "unit" / folder / "test_it.py")
        made = [("one", "one[a]"), ("one", "one[b]"), ("two", "two")]
        return [
            pytest.Function.from_parent(module, name=name, originalname=original, callobj=items)
            for original, name in made
        ]

    kernels, codecs = items("kernels/gpu"), items("codecs")
    folder = PROJECT / "tests" / "unit" / "kernels" / "gpu"
    assert first_cases([*kernels, *codecs], [folder]) == [kernels[0], kernels[2], *codecs]


def test_durations_of_a_long_run_are_added_up_by_file(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "new", "serial")
    for nodeid, seconds in (("t/u/a.py::one[x]", 30.0), ("t/u/b.py::two", 60.0), ("t/u/a.py::one[y]", 50.04)):
        report = pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, "call", duration=seconds)
        durations.pytest_runtest_logreport(report)
        durations.pytest_sessionfinish()
    assert json.loads((tmp_path / "new" / "u-serial.json").read_text()) == {"t/u/a.py": 80.0, "t/u/b.py": 60.0}
    Durations(tmp_path, "other").pytest_sessionfinish()
    assert [*tmp_path.glob("*.json")] == []
