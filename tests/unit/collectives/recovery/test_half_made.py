"""A rank outlives a death that is noticed while a communicator with the dead rank is half made."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from mpi4py import MPI

from tests.documents import PROJECT
from tests.run_lanes import environment

NOTICE = """
import ctypes, sys
from mpi4py import MPI
from collectives.recovery import half_made

mpi = ctypes.CDLL("libmpi.so.40")
function = half_made._address(mpi.mca_coll_base_revoke_local)
((table_at, _),) = set.intersection(*(set(half_made._tables(one, function)) for one in (MPI.COMM_WORLD, MPI.COMM_SELF)))
if sys.argv[1] == "guarded":
    assert half_made.guard_half_made()

def notice_death(comm):
    return mpi.ompi_comm_revoke_local(ctypes.c_void_p(MPI._handleof(comm)), ctypes.c_bool(True))

half_made_comm, complete = MPI.COMM_SELF.Dup(), MPI.COMM_SELF.Dup()
pointer = ctypes.c_void_p.from_address(MPI._handleof(half_made_comm) + table_at)
table, pointer.value = pointer.value, None  # as Open MPI has it before the last agreement
assert notice_death(half_made_comm)
assert pointer.value is None  # Open MPI would free a table that it finds
pointer.value = table
assert not notice_death(half_made_comm)  # it is known
assert notice_death(complete)
complete.Free()
half_made_comm.Free()
"""
HAS_FAULT = MPI.Get_library_version().startswith(("Open MPI v5.0.10", "Open MPI v5.0.11"))


def notice(how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NOTICE, how]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=PROJECT, env=environment()
    )


@pytest.mark.skipif(not HAS_FAULT, reason="this MPI library has no such fault")
def test_a_death_noticed_before_a_communicator_has_its_collectives_ends_no_process() -> None:
    assert notice("as it is").returncode == -signal.SIGSEGV
    guarded = notice("guarded")
    assert guarded.returncode == 0, guarded.stderr
