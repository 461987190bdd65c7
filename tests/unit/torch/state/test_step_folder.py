"""Folders of checkpoints: full disks, several runs, and messages of damaged or wrong ones."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from mpicomp import Communicator, run_local
from mpicomp.torch import load_checkpoint, save_checkpoint
from mpicomp.torch.state import step_folder


def test_a_full_disk_of_one_rank_is_named_on_all_and_earlier_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(state: Any, file: Any) -> None:
        if state["rank"] == 1 and state["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(b"state")

    monkeypatch.setattr(torch, "save", save)

    def work(comm: Communicator) -> str:
        written = {0}
        for step in (1, 2):
            state = {"rank": comm.rank, "step": step}
            place, here = (0, comm.rank), f"rank {comm.rank}"
            arguments = here, OSError, tmp_path, step, place, lambda state=state: state, (1, 2), (), written
            if step == 1:
                step_folder.write(comm.allgather_object, *arguments)
        with pytest.raises(OSError, match="Errno 28") as caught:
            step_folder.write(comm.allgather_object, *arguments)
        return str(caught.value)

    first, second = run_local(2, work)
    assert first == second
    assert first.startswith("rank 1: [Errno 28] No space left on device: ")
    assert "stage-1.pt'; make room there, or name another folder" in first
    assert [one.name for one in step_folder.checkpoints(tmp_path)] == ["step-00000001"]


class Value:
    """Part with one value, or with an error."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(state["value"], str):
            raise KeyError(state["value"])
        self.value = state["value"]


def save(folder: Path, value: Any = 1, step: Any = 3, name: Any = "data") -> list[Path]:
    return run_local(2, lambda comm: save_checkpoint(folder, step, {name: Value(value)}, comm))


def load(folder: Path) -> list[int]:
    return run_local(2, lambda comm: load_checkpoint(folder, {"data": Value(0)}, comm))


def test_of_two_runs_that_save_one_step_one_checkpoint_is_complete_and_the_other_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = step_folder._check_types

    def save_meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(step_folder, "_check_types", check)
        save(tmp_path, 2)
        check(*arguments)

    monkeypatch.setattr(step_folder, "_check_types", save_meanwhile)
    with pytest.raises(OSError, match=r"another run has written .* meanwhile: give each run a folder of its own"):
        run_local(1, lambda comm: save_checkpoint(tmp_path, 3, {"data": Value(1)}, comm))
    assert load(tmp_path) == [3, 3]
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ('"replicas": 2', '"replicas": -2', "it has no replicas"),
        ('"replicas": 2', '"replicas": 2.5', "not an integer"),
        ('"replicas": 2', '"replicas": 3', "numbers of ranks and files differ"),
        ('"sha256"', '"other"', "it has no 'sha256'"),
        ("}", "", "is not JSON"),
    ],
)
def test_a_damaged_manifest_is_named_with_a_cure(tmp_path: Path, before: str, after: str, cause: str) -> None:
    manifest = save(tmp_path)[0] / "manifest.json"
    manifest.write_text(manifest.read_text().replace(before, after))
    with pytest.raises(ValueError, match=rf"manifest\.json.*{cause}.* remove .*step-00000003 to load an earlier one"):
        load(tmp_path)


def test_an_error_of_a_part_has_its_type_and_the_parts_name(tmp_path: Path) -> None:
    save(tmp_path, "lr")
    with pytest.raises(ValueError, match="part 'data': KeyError: 'lr'"):
        load(tmp_path)


@pytest.mark.parametrize("step", [True, 10**15, 0, 2.0])
def test_a_step_that_would_not_be_found_again_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(OSError, match=r"step is .*: pass the number of steps so far"):
        save(tmp_path, step=step)


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is no folder"):
        load(tmp_path / "file")


def test_a_part_name_that_is_no_text_and_dtensors_are_refused(tmp_path: Path) -> None:
    class DTensor:
        pass

    with pytest.raises(OSError, match="the name of a part is 1: let it be a text"):
        save(tmp_path, name=1)
    with pytest.raises(OSError, match=r"'value' of part 'data' is a DTensor.* by torch\.distributed\.checkpoint"):
        save(tmp_path, DTensor())


def test_ranks_with_other_folders_are_refused_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="use a folder that all ranks see"):
        run_local(2, lambda comm: save_checkpoint(tmp_path / str(comm.rank), 1, {"data": Value(1)}, comm))
