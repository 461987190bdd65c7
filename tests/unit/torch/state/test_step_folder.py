"""Folders of checkpoints on a full disk."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from mpicomp import Communicator, run_local
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
