"""`mpicomp demo` under mpirun: the ranks of MPI train, and rank 0 reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from mpicomp.cli.main import main
from tests.mpi.lanes import up_to_two_ranks

WORLD = MPI.COMM_WORLD


@up_to_two_ranks
@pytest.mark.mpi(min_size=2)
def test_ranks_of_mpi_train_and_one_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1", "--link", "1gbit", "--output", str(tmp_path / "demo.png")]) == 0
    out, err = capsys.readouterr()
    assert bool(out) == bool(err) == (WORLD.rank == 0)
    if WORLD.rank == 0:
        assert "2 ranks of MPI, emulated links of 1 Gbit/s" in out


@up_to_two_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("arguments", [("--ranks", "4"), ("--link", "fast"), ("--output", "demo.txt")])
def test_one_rank_reports_arguments_that_cannot_be_used(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert capsys.readouterr().err.count(f"error: {arguments[0]} ") == (WORLD.rank == 0)
