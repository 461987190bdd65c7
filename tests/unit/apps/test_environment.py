"""Description of the machine in a record."""

from __future__ import annotations

import json

import pytest

from apps.environment import describe, environment, huge_page_policy, mpi_library


def test_the_machine_is_described_in_a_sentence() -> None:
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["cpu"] in describe(found)
    assert huge_page_policy("always [madvise] never\n") == "madvise"


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI root@host, ident: 5.0.11\0", "Open MPI v5.0.11"),
        ("MPICH Version:      4.3.2\nMPICH Release date: Mon Oct  6\nMPICH ABI: 17:2:5\n\0", "MPICH 4.3.2"),
    ],
)
def test_a_library_is_called_by_name_and_version(told: str, name: str) -> None:
    assert mpi_library(told) == name
