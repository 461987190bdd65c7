"""One Slurm for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.slurm.cluster import SlurmCluster, missing, open_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """Two nodes; the tests are skipped, which the summary says, where there can be none."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with open_cluster() as started:
        yield started
