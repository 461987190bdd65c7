"""Stages that are made again over files of messages: of a crashed run, of another run, and of one that goes on."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import Communicator
from mpicomp.codecs.rows import RowQuantizer
from mpicomp.pipeline import Deltas, FileMessageStore, PipelineError, PipelineStage
from mpicomp.pipeline.store_file import StoreFile
from tests.mpi.pipeline.stages import EXAMPLES, given, layer, staged

pytestmark = pytest.mark.mpi(min_size=2, max_size=3)
LOST = "cut-0-after"  # a file of rank 1


@contextmanager
def over_files(comm: Communicator, folder: Path, shift: float = 0.0, **options: Any) -> Iterator[PipelineStage]:
    """A stage whose activations depend on `shift`, with messages in a folder."""
    module = layer(comm.rank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += shift
    stage = staged(comm, module, forward=Deltas(RowQuantizer(4), EXAMPLES, folder=folder, **options))
    try:
        yield stage
    finally:
        stage.close()
        comm.barrier()


def forward_bytes(comm: Communicator, stage: PipelineStage) -> tuple[float, int]:
    """Return the loss of a step, and the bytes of the first stage's activations in it."""
    before = stage.bytes_sent[0]
    loss = stage.step(**given(comm))
    return loss, comm.allgather_object(stage.bytes_sent[0] - before)[0]


def put(comm: Communicator, source: Path, target: Path) -> None:
    """Give rank 1 another file."""
    if comm.rank == 1:
        shutil.copy(source, target)
    comm.barrier()


@pytest.mark.parametrize("check_every", [1, 100])
def test_a_full_disk_is_reported_on_all_ranks(
    comm: Communicator, folder: Path, check_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    stage = staged(comm, forward=Deltas(RowQuantizer(4), EXAMPLES, folder=folder, check_every=check_every))
    for _ in range(2):
        stage.step(**given(comm))
    if comm.rank == 1:
        monkeypatch.setattr(StoreFile, "write_row", refuse)
    for _ in range(3):  # a thread writes: the error is there after the first step, or in the next one
        with suppress(PipelineError):
            stage.step(**given(comm))
    with pytest.raises(PipelineError, match=r"stage 1: .*rows could not be written back.*the disk is full"):
        stage.step(**given(comm))
    with pytest.raises(PipelineError, match=r"the messages were not compared: stage 1: .*the disk is full"):
        stage.stores_alike()
    with pytest.raises(OSError, match="the disk is full") if comm.rank == 1 else nullcontext():
        stage.close()


def test_a_file_that_fails_while_messages_are_compared_is_reported_on_all_ranks(
    comm: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    failing = comm.size - 2
    with over_files(comm, folder) as stage:
        for loads in (False, True):
            stage.step(**given(comm))
            state = stage.state_dict()
            with monkeypatch.context() as patch:
                if comm.rank == failing:
                    patch.setattr(FileMessageStore, "_store_forgotten", refuse)
                with pytest.raises(PipelineError, match=rf"not compared: stage {failing}: OSError: .*disk is full"):
                    stage.load_state_dict(state) if loads else stage.compare_stores()
            with pytest.raises(PipelineError, match=rf"the step was not begun: stage {failing}: .*disk is full"):
                stage.step(**given(comm))
            stage.load_state_dict(state)
            stage.step(**given(comm))
            assert stage.stores_alike()


@pytest.mark.parametrize("lost", ["rows", "file"])
def test_rows_that_one_end_has_lost_are_sent_in_full_after_a_crash(comm: Communicator, folder: Path, lost: str) -> None:
    with over_files(comm, folder, run="one") as stage:
        full = forward_bytes(comm, stage)[1]
    put(comm, folder / LOST, folder / "earlier")
    with over_files(comm, folder, 0.5, run="one") as stage:
        stage.step(**given(comm))
    if lost == "rows":
        put(comm, folder / "earlier", folder / LOST)
    elif comm.rank == 1:
        (folder / LOST).unlink()
    comm.barrier()
    with over_files(comm, folder, 0.5, run="one") as stage:
        exact = stage.evaluate(given(comm)["inputs"], given(comm)["targets"])
        for _ in range(2):
            loss, sent = forward_bytes(comm, stage)
            assert stage.stores_alike()
            assert loss == pytest.approx(exact, abs=1e-2)
            assert (sent == full) == (_ == 0)


def test_files_of_different_runs_are_no_pair_though_their_examples_were_visited_equally_often(
    comm: Communicator, folder: Path
) -> None:
    with over_files(comm, folder / "other", 0.5, run="one") as stage:
        stage.step(**given(comm))
    with over_files(comm, folder, run="one") as stage:
        full = forward_bytes(comm, stage)[1]
    put(comm, folder / "other" / LOST, folder / LOST)
    with over_files(comm, folder, run="one") as stage:
        assert forward_bytes(comm, stage)[1] == full
        assert stage.stores_alike()


def test_files_that_agree_serve_a_run_of_the_same_name(comm: Communicator, folder: Path) -> None:
    with over_files(comm, folder, run="one") as stage:
        full = forward_bytes(comm, stage)[1]
    with over_files(comm, folder, run="one") as stage:
        assert forward_bytes(comm, stage)[1] < full
        assert stage.stores_alike()


def test_a_second_run_without_a_name_does_not_begin_with_the_first_ones_messages(
    comm: Communicator, folder: Path
) -> None:
    found = []
    for folder_of_run in (folder / "same", folder / "same", folder / "other"):
        with over_files(comm, folder_of_run) as stage:
            found.append([forward_bytes(comm, stage) for _ in range(2)])
        with over_files(comm, folder_of_run, 0.5) as stage:
            stage.step(**given(comm))
    assert found[0] == found[1] == found[2]


def test_a_run_without_a_name_goes_on_from_its_files_once_it_has_loaded_its_state(
    comm: Communicator, folder: Path
) -> None:
    with over_files(comm, folder) as stage:
        full = forward_bytes(comm, stage)[1]
        state = stage.state_dict()
    with over_files(comm, folder) as stage:
        stage.load_state_dict(state)
        assert forward_bytes(comm, stage)[1] < full


def test_a_state_whose_files_another_run_has_taken_over_finds_no_messages(comm: Communicator, folder: Path) -> None:
    with over_files(comm, folder) as stage:
        full = forward_bytes(comm, stage)[1]
        state = stage.state_dict()
    with over_files(comm, folder, 0.5) as stage:
        stage.step(**given(comm))
    with over_files(comm, folder) as stage:
        stage.load_state_dict(state)
        assert forward_bytes(comm, stage)[1] == full
        assert stage.stores_alike()


def test_files_of_two_continuations_of_one_run_are_no_pair_though_their_stamps_are_equal(
    comm: Communicator, folder: Path
) -> None:
    with over_files(comm, folder / "one", run="one") as stage:
        full = forward_bytes(comm, stage)[1]
    if comm.rank == 0:
        shutil.copytree(folder / "one", folder / "other")
    comm.barrier()
    for name, shift in (("one", 0.0), ("other", 0.5)):
        with over_files(comm, folder / name, shift, run="one") as stage:
            assert forward_bytes(comm, stage)[1] < full  # each goes on from the messages of before
    put(comm, folder / "other" / LOST, folder / "one" / LOST)
    with over_files(comm, folder / "one", run="one") as stage:
        assert forward_bytes(comm, stage)[1] == full
        assert stage.stores_alike()


def test_states_of_two_continuations_of_one_state_are_no_pair(comm: Communicator) -> None:
    def stage_from(state: Any, shift: float) -> tuple[int, Any]:
        module = layer(comm.rank)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += shift
        stage = staged(comm, module, forward=Deltas(RowQuantizer(4), EXAMPLES))
        if state is not None:
            stage.load_state_dict(state)
        sent = forward_bytes(comm, stage)[1]
        assert stage.stores_alike()
        return sent, stage.state_dict()

    full, state = stage_from(None, 0.0)
    one, other = stage_from(state, 0.0), stage_from(state, 0.5)
    assert one[0] == other[0] < full
    assert stage_from(other[1] if comm.rank == 1 else one[1], 0.0)[0] == full


def test_an_older_state_goes_on_from_files_that_have_been_opened_again_since(comm: Communicator, folder: Path) -> None:
    with over_files(comm, folder, run="one") as stage:
        full = forward_bytes(comm, stage)[1]
        state = stage.state_dict()
    for _ in range(2):  # the first of two restarts from the same checkpoint ended before the next checkpoint
        with over_files(comm, folder, run="one") as stage:
            stage.load_state_dict(state)
            assert forward_bytes(comm, stage)[1] < full
            assert stage.stores_alike()
