"""Names of mpi4py's communicators are answered by ours."""

from __future__ import annotations

import pickle
import re

import pytest

from collectives.errors import explains_itself
from mpicomp import Communicator, run_local


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Get_rank", "a Communicator has no 'Get_rank': write comm.rank"),
        (
            "Alltoall",
            "a Communicator has no 'Alltoall', which MPI's communicators may have: write comm.mpi_comm.Alltoall",
        ),
        ("all_reduce", "a Communicator has no 'all_reduce' (did you mean 'allreduce'?)"),
        ("nothing_like_it", "a Communicator has no 'nothing_like_it'"),
    ],
)
def test_an_unknown_name_is_explained(name: str, text: str) -> None:
    def look(comm: Communicator) -> None:
        assert not hasattr(comm, name)
        with pytest.raises(AttributeError, match=f"^{re.escape(text)}$") as caught:
            getattr(comm, name)
        assert explains_itself(caught.value)

    run_local(1, look)


def test_an_unfinished_object_is_no_endless_search() -> None:
    with pytest.raises(AttributeError, match="has no 'routes'"):
        Communicator.__new__(Communicator).select(1)

    def copy(comm: Communicator) -> None:
        with pytest.raises(TypeError):
            pickle.dumps(comm)

    run_local(1, copy)
