"""Fixtures for tests of whole runs."""

from tests.unit.faults.jobs import jobs

__all__ = ["jobs"]
