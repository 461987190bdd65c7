"""Faults of whole jobs: each test starts ``mpirun`` and harms it."""

from tests.unit.faults.jobs import jobs

__all__ = ["jobs"]
