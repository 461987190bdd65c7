"""Fuzzing: no reader crashes on any input, faults that were found stay mended, and the harness finds planted ones."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from apps.fuzz.__main__ import main, targets
from apps.fuzz.campaign import random_campaign
from apps.fuzz.guarded import GuardedMemory
from apps.fuzz.mutation import inputs
from apps.fuzz.target import Target
from apps.performance.cluster.grid import parse_size
from apps.train.checkpoint_files import CheckpointFiles
from mpicomp.cli.arguments import counts

KINDS = {
    "a description that is no UTF-8": ("call-descriptions", b"\xff"),
    "a description with one separator more": ("call-descriptions", b"x\x1fallreduce\x1fa\x1ea\x1eb"),
    "a description with one separator less": ("call-descriptions", b"x\x1fallreduce\x1fa"),
    "a header that is no UTF-8": ("array-headers", b"float32\xff"),
    "a fault that is no UTF-8": ("pipeline-faults", b"\xc2"),
    "a question that is cut off": ("missing-ranks", b"\0" * 9),
    "a layout of an unknown type": ("pipeline-layouts", b"\0" + struct.pack("<10q", 9, 1, 4, *[0] * 7)),
    "a layout of other fields": ("pipeline-layouts", b'\1["\\"*\\"", [{"dtype": 1}]]'),
    "a layout of no tensor": ("pipeline-layouts", b'\1["[\\"tuple\\", 3]", []]'),
    "more hosts than there are": ("allocations", b"\0 7\n\1 n[1-99999999]"),
    "more repetitions than hosts": ("allocations", b"\0 7\n\1 n[1-2]\n\3 4(x99999999)"),
    "a node without tasks": ("allocations", b"\0 7\n\1 n\n\2 4\n\3 0"),
    "a host file that is no UTF-8": ("allocations", b"\5 \n\nh\xe4st\n"),
    "a line of another form in cgroup": ("quotas", b"0\n\nmax"),
    "a limit in cgroup that is no UTF-8": ("quotas", b"0::/\n\n\xff"),
    "an option that Python cannot hash": ("assignments", b"a={[]: 1}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_was_found_is_an_error_or_a_value_now(kind: str) -> None:
    name, content = KINDS[kind]
    assert targets()[name].fault(content) == ""


def test_a_range_of_counts_that_takes_forever_is_refused() -> None:
    with pytest.raises(ValueError, match="take a larger factor"):
        counts("1:2:1.0000001")


def test_a_size_beyond_float64_is_refused() -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size("9" * 400 + "MB")


def test_a_file_of_pytorch_that_names_a_place_before_its_beginning_is_damaged(tmp_path: Path) -> None:
    from mpicomp.torch.state import rank_files

    (tmp_path / "rank.pt").write_bytes(b"PK")
    with (
        mock.patch.object(rank_files.torch, "load", side_effect=OSError(22, "Invalid argument")),
        pytest.raises(ValueError, match=r"rank\.pt is damaged"),
    ):
        rank_files._read(tmp_path / "rank.pt")


def test_a_fifo_in_place_of_a_manifest_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ValueError, match="FIFO"):
        CheckpointFiles(tmp_path, "start again")


@pytest.mark.timeout(300)  # kernels may have to be compiled
def test_each_target_reads_random_inputs_without_a_fault(tmp_path: Path) -> None:
    """Run them in a process of its own, which a read beyond an array would end."""
    command = [sys.executable, "-W", "ignore", "-m", "apps.fuzz", "--all", "--plain", "--runs=60"]
    done = subprocess.run([*command, f"--corpus={tmp_path}"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()[:-1]} == {*targets()}


# The harness ----------------------------------------------------------------------------------------------------------


def test_a_planted_fault_is_found_and_its_input_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def read(content: bytes) -> int:
        return [10, 20][content[0] % 4] if content else 0

    planted = Target("planted", "", lambda: [b"\0"], read)
    with mock.patch("apps.fuzz.__main__.targets", return_value={"planted": planted}):
        assert main(["planted", "--plain", "--runs=1000", f"--corpus={tmp_path}"]) == 1
    assert "IndexError" in capsys.readouterr().out
    assert (tmp_path / "fault-planted").read_bytes()[0] % 4 >= 2


def test_errors_of_derived_types_and_errors_without_text_are_faults() -> None:
    def read(content: bytes) -> None:
        if content:
            raise ValueError
        b"\xff".decode()

    target = Target("planted", "", lambda: [b""], read)
    assert target.fault(b"").startswith("UnicodeDecodeError")
    assert target.fault(b"x") == "a ValueError without a message"


def test_an_input_that_takes_too_long_is_a_fault() -> None:
    def read(content: bytes) -> None:
        while content:
            pass

    with mock.patch("apps.fuzz.campaign.HUNG_S", 0.05):
        assert "took longer" in random_campaign(Target("planted", "", lambda: [b""], read), 100, 0, 1).fault
    with mock.patch("apps.fuzz.campaign.LONGEST_S", -1.0):
        assert "took longer" in random_campaign(Target("planted", "", lambda: [b""], len), 1, 0, 1).fault


def test_guarded_memory_finds_writes_before_an_array_and_ends_at_a_page() -> None:
    memory = GuardedMemory(100)
    values = memory.empty(5, np.uint32)
    assert (values.ctypes.data + values.nbytes) % os.sysconf("SC_PAGESIZE") == 0
    memory.check()
    memory._bytes[memory._start - 1] = 0
    with pytest.raises(AssertionError):
        memory.check()


def test_a_read_behind_guarded_memory_ends_the_process() -> None:
    program = (
        "import ctypes; from apps.fuzz.guarded import GuardedMemory; one = GuardedMemory(8).copy(b'12345678'); "
        "ctypes.string_at(one.ctypes.data, 9)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -11


def test_inputs_are_the_same_for_the_same_seed() -> None:
    seeds = [b"seed", b'{"a": 12}']
    assert [*inputs(seeds, 50, 3)] == [*inputs(seeds, 50, 3)] != [*inputs(seeds, 50, 4)]
