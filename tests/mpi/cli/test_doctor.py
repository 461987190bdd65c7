"""`mpicomp doctor` under mpirun: one report for the job, one exit status on every rank."""

from __future__ import annotations

import argparse
import time

import pytest
from mpi4py import MPI

from mpicomp.cli import doctor
from mpicomp.cli.doctor import mpi
from tests.mpi.lanes import few_ranks

pytestmark = few_ranks


@pytest.mark.mpi(min_size=2)
def test_rank_0_reports_for_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.run(argparse.Namespace(json=False, deadline="30"))
    printed = capsys.readouterr().out
    assert status == 0
    assert (f"{MPI.COMM_WORLD.size} ranks" in printed) == (MPI.COMM_WORLD.rank == 0)
    assert ("all-reduce of 1 MiB took" in printed) == (MPI.COMM_WORLD.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_not_answer_are_reported_within_the_deadline(mpi_comm: MPI.Intracomm) -> None:
    soon = MPI.Wtime() + 1.0
    if mpi_comm.rank == 0:
        finding = mpi.messages(mpi_comm, deadline_s=0.1)
        assert finding.status == "FAIL"
        assert "has not ended after 0.1 s" in finding.text
    while MPI.Wtime() < soon:
        time.sleep(0.01)
    if mpi_comm.rank != 0:
        assert mpi.messages(mpi_comm, deadline_s=30.0).status == "ok"
