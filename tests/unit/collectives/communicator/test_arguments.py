"""Arguments of a communicator that cannot be used: one sentence with the cure."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from collectives import Communicator, Ring
from collectives.communicator.arguments import timeouts
from collectives.recovery import arguments as recovery_arguments
from mpicomp import run_local


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (
            {"topology": "rign"},
            ValueError,
            r"'rign' \(did you mean 'ring'\?\): choose one of auto, mpi, ring",
        ),
        ({"topology": "Double_Tree"}, ValueError, r"\(did you mean 'double-tree'\?\)"),
        ({"topology": "xyz"}, ValueError, "no topology 'xyz': choose one of"),
        ({"topology": Ring}, TypeError, r"the topology is a class: write Ring\(\)"),
        ({"topology": 3}, TypeError, "the topology is 3: pass a name"),
        ({"mpi_comm": "ring"}, TypeError, r"the first argument is mpi_comm: write Communicator\(topology='ring'\)"),
        ({"mpi_comm": Ring()}, TypeError, "the first argument is mpi_comm"),
        ({"timeout": 0}, ValueError, "timeout is 0: it must be a positive number of seconds"),
        ({"arrival_timeout": -1}, ValueError, "arrival_timeout is -1: it must be"),
        ({"piece_bytes": 0}, ValueError, "piece_bytes must lie in"),
        ({"threads": 0}, ValueError, r"threads must lie in 1 \.\. 1024, not 0"),
        ({"threads": 1.5}, TypeError, "threads must be a whole number, not 1.5"),
        ({"threads": True}, TypeError, "threads must be a whole number, not True"),
    ],
)
def test_an_argument_that_cannot_be_used_is_told_with_rank_and_cure(
    arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=f"^rank 0 of 1: .*{told}") as caught:
        Communicator(**arguments)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(("given", "told"), [(3, "mpi_comm is 3: pass a communicator"), (MPI.COMM_NULL, "COMM_NULL")])
def test_what_is_no_communicator_of_mpi_is_refused(given: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        Communicator(given)


@pytest.mark.parametrize(
    ("given", "environ", "found"),
    [
        ((None, None), {}, (60, 1800)),
        ((None, None), {"MPICOMP_TIMEOUT": "5", "MPICOMP_ARRIVAL_TIMEOUT": "6"}, (5, 6)),
        ((7, 8), {"MPICOMP_TIMEOUT": "5", "MPICOMP_ARRIVAL_TIMEOUT": "6"}, (7, 8)),
        ((7, None), {"MPICOMP_ARRIVAL_TIMEOUT": "6"}, (7, 6)),
        ((7200, None), {}, (7200, 7200)),  # who waits so long in a call waits as long before it
        ((float("inf"), 1), {"MPICOMP_TIMEOUT": ""}, (float("inf"), 1)),
    ],
)
def test_arguments_come_before_the_environment_and_that_before_the_default(
    given: tuple[float | None, float | None],
    environ: dict[str, str],
    found: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in "MPICOMP_TIMEOUT", "MPICOMP_ARRIVAL_TIMEOUT":
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert timeouts(*given) == found


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", "60 s"])
def test_what_is_no_number_of_seconds_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOMP_ARRIVAL_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"MPICOMP_ARRIVAL_TIMEOUT is '{value}': it must be a positive number"):
        timeouts(None, None)
    with pytest.raises((TypeError, ValueError), match=r"^timeout is .*: it must be a positive number of seconds"):
        timeouts(value, 1.0)


def test_ranks_with_different_on_failure_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recovery_arguments, "is_tolerant", lambda comm: True
    )  # ranks in threads do not outlive each other

    def make(comm: Communicator) -> str:
        on_failure: Any = "regroup" if comm.rank == 0 else "raise"
        with pytest.raises(ValueError, match="on_failure is") as caught:
            Communicator(comm.mpi_comm, abort_hook=False, on_failure=on_failure)
        return str(caught.value)

    text = "on_failure is 'regroup' on rank 0 and 'raise' on rank 1: pass the same on all ranks"
    assert run_local(2, make) == [text] * 2
