"""Types that a checker infers for a user's program: results have the types of arguments, and names are checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from collectives import TOPOLOGIES, TopologyName
from collectives.communicator.arguments import ROUTES
from tests.documents import PROJECT

# Behind each line: the type that is revealed, or the code of an error.
PROGRAM = """
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import mpicomp
from collectives import Communicator, Plan, Ring, Torus


@dataclass(frozen=True)
class Own:
    name = "own"

    def plan(self, rank: int, size: int) -> Plan:
        return Ring().plan(rank, size)


comm = mpicomp.Communicator(topology="ring")
aggregator = mpicomp.Marsit().start(comm, 3)
array: NDArray[np.int32] = np.ones(3, np.int32)
tensor = torch.ones(3)
unknown: Any = None
color: int | None = 0

Communicator(topology=Own())
Communicator(topology=Torus(2, 4))
Communicator(topology="rung")  # arg-type
comm.split(0, topology="rung")  # call-overload
mpicomp.run_local(2, lambda comm: comm.rank, topology="rung")  # arg-type
comm.allreduce([1.0, 2.0])  # call-overload
reveal_type(comm.allreduce(array))  # ndarray[tuple[Any, ...], dtype[signedinteger[_32Bit]]]
reveal_type(comm.allreduce(tensor, op="mean", out=tensor))  # Tensor
reveal_type(comm.allreduce(3))  # int
reveal_type(comm.allreduce(3, op="mean"))  # float
reveal_type(comm.allreduce(True))  # int
reveal_type(comm.allreduce(True, op="min"))  # bool
reveal_type(comm.allreduce(0.5, op="max"))  # float
reveal_type(comm.allreduce(np.float32(0.5)))  # float
reveal_type(comm.allreduce(unknown))  # Any
reveal_type(comm.iallreduce(tensor))  # Handle[Tensor]
reveal_type(comm.iallreduce(tensor).wait())  # Tensor
reveal_type(comm.broadcast(tensor))  # Tensor
reveal_type(comm.allgather(tensor))  # Tensor
reveal_type(comm.allgather_object({"rank": 1}))  # list[dict[str, int]]
reveal_type(comm.recv(tensor, 0))  # Tensor
reveal_type(comm.irecv(tensor, 0))  # Handle[Tensor]
reveal_type(comm.isend(tensor, 0))  # Handle[None]
reveal_type(comm.split(0))  # Communicator
reveal_type(comm.split(None))  # None
reveal_type(comm.split(color))  # Communicator | None
reveal_type(aggregator.aggregate(array))  # ndarray[tuple[Any, ...], dtype[signedinteger[_32Bit]]]
reveal_type(aggregator.aggregate(tensor))  # Tensor
reveal_type(aggregator.begin(tensor, tensor))  # Handle[Tensor]
reveal_type(mpicomp.run_local(2, lambda comm: comm.rank, topology="torus"))  # list[int]
"""


@pytest.mark.timeout(300)
def test_a_checker_infers_the_types_of_results_and_finds_misspelt_topologies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    api = pytest.importorskip("mypy.api")
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(PROJECT)
    printed, problems, _ = api.run([str(tmp_path / "program.py"), "--hide-error-context"])
    assert not problems
    pattern = r'^.*program.py:(\d+): (?:note: Revealed type is "(.*)"|error: .*\[(.*)\])$'
    found = re.findall(pattern, printed, re.MULTILINE)
    inferred = {int(line): re.sub(r"\w+\.(?=\w)", "", shown) or code for line, shown, code in found}
    lines = enumerate(PROGRAM.splitlines(), 1)
    assert inferred == {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}, printed


def test_the_names_of_topologies_for_checkers_are_those_that_a_communicator_accepts() -> None:
    assert get_args(TopologyName) == (*ROUTES, *TOPOLOGIES)
