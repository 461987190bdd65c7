"""Checkpoints of stages on threads: refusals, steps that fail on one rank, and folders of earlier runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mpicomp
from collectives import Communicator
from mpicomp.pipeline import PipelineError, PipelineStage, StageCheckpoints

Body = Callable[[StageCheckpoints, int, Callable[[], None]], Any]
"""Called with the checkpoints, the rank, and a function that makes the passes and the optimizer's step."""


def on_threads(folder: Path, body: Body, parts: Callable[[int], dict[str, Any]] = lambda rank: {}) -> list[Any]:
    """Run a body on two stages of one pipeline; returns the text of its PipelineError, or its result, by rank."""

    def rank(comm: Communicator) -> Any:
        module = nn.Linear(3, 3)
        stage = PipelineStage(module, comm, 2, loss=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def make_step() -> None:
            optimizer.zero_grad()
            stage.step(torch.ones(4, 3), -torch.ones(4, 3))
            optimizer.step()

        try:
            with StageCheckpoints(folder, stage, {"module": module, **parts(comm.rank)}) as checkpoints:
                return body(checkpoints, comm.rank, make_step)
        except PipelineError as error:
            return str(error)
        finally:
            stage.close()

    return mpicomp.run_local(2, rank)


def test_a_communicator_that_regroups_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def rank(comm: Communicator) -> str:
        stage = PipelineStage(nn.Linear(3, 3), comm, 2, loss=nn.functional.mse_loss)
        if comm.rank == 1:
            comm.recovery = SimpleNamespace(count=0)  # type: ignore[assignment]
        try:
            with pytest.raises(PipelineError) as caught:
                StageCheckpoints(tmp_path, stage, {})
        finally:
            comm.recovery = None
        return str(caught.value)

    found = mpicomp.run_local(2, rank)
    assert all('on_failure="raise"' in text for text in found), found


def test_a_step_of_another_run_is_not_taken_and_later_ones_displace_no_new_checkpoint(tmp_path: Path) -> None:
    def body(checkpoints: StageCheckpoints, rank: int, make_step: Callable[[], None]) -> None:
        checkpoints.load()
        if rank == 0:
            for step in (1, 7, 8, 9):
                (tmp_path / f"step-{step:08d}").mkdir()
        for _ in range(2):
            with checkpoints.step():
                make_step()
            if checkpoints.steps == 1:
                with pytest.raises(PipelineError, match="step-00000001 is of another run"):
                    checkpoints.save()
        checkpoints.save()
        assert (tmp_path / "step-00000002" / "manifest.json").exists()

    assert on_threads(tmp_path, body) == [None, None]


def test_no_checkpoint_is_written_after_a_state_that_could_not_be_loaded(tmp_path: Path) -> None:
    def body(checkpoints: StageCheckpoints, rank: int, make_step: Callable[[], None]) -> None:
        checkpoints.load()
        for _ in range(2):
            with checkpoints.step():
                make_step()
            checkpoints.save()
        if rank == 0:
            (tmp_path / "step-00000002" / "replica-0-stage-1.pt").write_bytes(b"")
        with pytest.raises(PipelineError, match="damaged"):
            checkpoints.load()
        checkpoints.save()

    assert all("call load()" in text for text in on_threads(tmp_path, body))


def test_nothing_is_saved_in_the_middle_of_a_step(tmp_path: Path) -> None:
    def body(checkpoints: StageCheckpoints, rank: int, make_step: Callable[[], None]) -> None:
        with checkpoints.step():
            checkpoints.save()

    assert all("call it after the block" in text for text in on_threads(tmp_path, body))


class Fragile:
    """Part whose state cannot be made while `fails` is set, or has a value of any type."""

    def __init__(self, fails: bool = False, value: object = 1) -> None:
        self.fails, self.value = fails, value

    def state_dict(self) -> dict[str, object]:
        if self.fails:
            raise OSError("no room on the disk")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def test_a_state_that_one_rank_cannot_make_is_an_error_of_all(tmp_path: Path) -> None:
    def body(checkpoints: StageCheckpoints, rank: int, make_step: Callable[[], None]) -> None:
        checkpoints.save()

    found = on_threads(tmp_path, body, lambda rank: {"other": Fragile(fails=rank == 1)})
    assert found == ["rank 1 of 2: no room on the disk"] * 2


def test_a_rank_that_fails_after_the_passes_ends_the_step_of_all(tmp_path: Path) -> None:
    def body(checkpoints: StageCheckpoints, rank: int, make_step: Callable[[], None]) -> tuple[str, int]:
        checkpoints.load()
        with checkpoints.step():
            make_step()
        checkpoints.save()

        def fail() -> None:
            with checkpoints.step():
                make_step()
                if rank == 1:
                    raise ValueError("no such rate")

        with pytest.raises((ValueError, PipelineError)) as caught:
            fail()
        with pytest.raises(PipelineError, match=r"call load\(\)"):
            checkpoints.save()  # of stages that have made different steps
        checkpoints.load()
        with checkpoints.step():
            make_step()
        return str(caught.value), checkpoints.steps

    (other, steps), (own, same) = on_threads(tmp_path, body)
    assert "rank 1 failed after the passes of a step (ValueError: no such rate)" in other
    assert (own, steps, same) == ("no such rate", 2, 2)


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    def body(checkpoints: StageCheckpoints, rank: int, make_step: Callable[[], None]) -> None:
        checkpoints.steps = rank
        with checkpoints.step():
            make_step()

    assert all("the ranks end different steps ([0, 1])" in text for text in on_threads(tmp_path, body))


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_first_saved(tmp_path: Path) -> None:
    def body(checkpoints: StageCheckpoints, rank: int, make_step: Callable[[], None]) -> None:
        checkpoints.save()

    found = on_threads(tmp_path, body, lambda rank: {"other": Fragile(value=tmp_path if rank == 1 else 1)})
    assert all(text.startswith("rank 1 of 2: the state_dict of other has a value") for text in found), found
    assert not list(tmp_path.glob("step-*"))


def test_unfinished_folders_are_removed_by_the_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.partial").mkdir()

    def body(checkpoints: StageCheckpoints, rank: int, make_step: Callable[[], None]) -> None:
        for _ in range(3):
            with checkpoints.step():
                make_step()
            checkpoints.save()

    assert on_threads(tmp_path, body) == [None, None]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
