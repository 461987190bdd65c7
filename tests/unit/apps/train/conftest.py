"""What the tests of whole runs share."""

from tests.unit.faults.jobs import jobs

__all__ = ["jobs"]
