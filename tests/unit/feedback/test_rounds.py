"""Reducers reach feedback by its rounds alone, and codecs declare their capabilities."""

from __future__ import annotations

import ast
import gc
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import mpicomp
from collectives.threads.run_local import run_local
from mpicomp.reducers.families import SharedIndices

ROOMS = ("aggregator", "codecs", "feedback", "reducers")


def reaches(start: object, wanted: object) -> bool:
    """Return True if references lead from one object to another, past modules, classes and functions."""
    seen, todo = {id(start)}, [start]
    while todo:
        for one in gc.get_referents(todo.pop()):
            if one is wanted:
                return True
            if id(one) not in seen and not isinstance(one, (type, ModuleType, FunctionType, mpicomp.Communicator)):
                seen.add(id(one))
                todo.append(one)
    return False


def parts_of(name: str) -> tuple[Any, Any]:
    def start(comm: mpicomp.Communicator) -> tuple[Any, Any]:
        aggregator = mpicomp.algorithm(name).start(comm, 256)
        return aggregator.feedback, aggregator.reducer

    return run_local(2, start)[0]


@pytest.mark.parametrize("name", sorted(mpicomp.ALGORITHMS))
def test_a_reducer_holds_no_feedback(name: str) -> None:
    feedback, reducer = parts_of(name)
    chooses_by_residual = issubclass(mpicomp.ALGORITHMS[name], SharedIndices)
    assert reaches(reducer, feedback) is chooses_by_residual


@pytest.mark.parametrize("name", sorted(mpicomp.ALGORITHMS))
def test_rounds_are_one_where_pieces_wait_for_reports(name: str) -> None:
    feedback, _ = parts_of(name)
    rounds = feedback.rounds()
    assert rounds
    assert len(rounds) == 1 or not feedback.decodes_with_reports


@pytest.mark.parametrize("room", ROOMS)
def test_capabilities_are_declared(room: str) -> None:
    folder = Path(mpicomp.__file__).parent / room
    asked = [
        (path.name, node.lineno)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
        and isinstance(node.args[0], ast.Name) and node.args[0].id in ("codec", "feedback", "inner", "reducer")
    ]  # fmt: skip
    assert not asked
