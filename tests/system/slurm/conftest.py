"""One Slurm for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.slurm.cluster import SlurmCluster, missing, open_cluster


@pytest.fixture(scope="session")
def possible() -> None:
    """Skip the tests, with the reason in the summary, where there can be no Slurm."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(possible: None) -> Iterator[SlurmCluster]:
    """Two nodes."""
    with open_cluster() as started:
        yield started
