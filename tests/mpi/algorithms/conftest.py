"""What the tests of the algorithms share."""

from __future__ import annotations

from tests.mpi.collectives.conftest import jitter, pytest_generate_tests

__all__ = ["jitter", "pytest_generate_tests"]
