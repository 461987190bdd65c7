"""The default process group for programs that leave its making to a framework."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from mpicomp.torch.process_group.mpi_process_group import NAME
from mpicomp.torch.process_group.registration import register_backend


def join_process_group(timeout: timedelta = default_pg_timeout) -> None:
    """Make the default process group over MPI unless there is one; it ends with the program at the latest.

    Frameworks use a group that exists. Accelerate refuses several nodes without MASTER_ADDR, though nothing connects to
    it any more.
    """
    register_backend()
    if not dist.is_initialized():
        dist.init_process_group(NAME, timeout=timeout)
        atexit.register(leave_process_group)
    os.environ.setdefault("MASTER_ADDR", "localhost")


def leave_process_group() -> None:
    """End the default process group if there is one; collective."""
    if dist.is_initialized():
        dist.destroy_process_group()
