"""State that a feedback of one's own keeps: errors, which are pending, and vectors that are not, under any names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomp import Auto, Communicator, PerNode, redistribute, run_local
from mpicomp.aggregator.algorithm import Parts
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.feedback.base import Residual, compute_type
from mpicomp.feedback.codes import GatheredCodes
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.recovery.joint_end import make_copies
from mpicomp.reducers.all_gather import all_gather
from mpicomp.reducers.families import GatheringMethod
from tests.methods import METHODS

N = 300
ERRORS = {"residual", "worker_error", "owner_error"}


class SmoothedCodes(GatheredCodes):
    """Codes of a running mean, and an error that is half of the vector: late by a step, but not lost."""

    def __init__(self, *arguments: Any, n: int, dtype: str, key: str) -> None:
        super().__init__(*arguments)
        kind = compute_type(dtype)
        self.smooth = self.residuals[key] = Residual(self.device, n, kind, pending=False)
        self.smooth.current[:] = self.smooth.following[:] = 1  # fresh state need not be zero
        self.late = self.residuals["late"] = Residual(self.device, n, kind)

    def _part(self, cut: range) -> Any:
        some = slice(cut.start, cut.stop)
        self.smooth.following[some] = (self.smooth.current[some] + self._values[some]) / 2
        self.late.following[some] = self._values[some] / 2
        return self._values[some] / 2 + self.late.current[some]


@dataclass(frozen=True)
class Late(GatheringMethod):
    """Mean of half of the ranks' vectors and half of those of the step before."""

    key: str = "velocity"

    def codec_for(self, dtype: str, lengths: Any) -> Any:
        return FullPrecision(dtype)

    def parts(self, comm: Communicator, spec: Any) -> Parts:
        codes = partial(SmoothedCodes, n=spec.n, dtype=spec.dtype, key=self.key)
        return all_gather(comm, spec, FullPrecision(spec.dtype), ErrorFeedback(), feedback=codes)


@pytest.mark.parametrize("key", ["velocity", "momentum", "a mean of weights"])
def test_a_dense_step_of_auto_adds_the_errors_and_no_other_state(key: str) -> None:
    def work(comm: Communicator) -> Any:
        auto = Auto(Late(key), trial_steps=2).start(comm, N)
        results, compressed = [], []
        for _ in range(40):
            results.append(float(auto.aggregate(np.ones(N, np.float32))[7]))
            compressed.append(bool(auto.state_dict()["auto"][-1]))
        return results, compressed, auto.state_dict()

    for results, compressed, state in run_local(2, work):
        assert any(before and not now for before, now in pairwise(compressed))
        assert sum(results) + state["late"][7] == 40  # each gradient has been applied once
        assert max(results) == 1.5  # a gradient and the half of one that was late
        assert state[key][7] == 1


@pytest.mark.parametrize("key", ["velocity", "momentum"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_single_node_adds_the_errors_of_several_and_no_other_state(key: str, ranks: int) -> None:
    method = PerNode(Late(key))

    def train(comm: Communicator) -> Any:
        aggregator = method.start(comm, N)
        aggregator.aggregate(np.full(N, comm.rank, np.float32))
        return aggregator.state_dict(), aggregator.state_kinds

    states, kinds = zip(*run_local(4, train, ranks_per_node=2), strict=True)

    def resume(comm: Communicator) -> Any:
        aggregator = method.start(comm, N)
        aggregator.load_state_dict(redistribute(states, comm.size, kinds[0])[comm.rank])
        return aggregator.aggregate(np.ones(N, np.float32)), aggregator.state_dict()

    for result, state in run_local(ranks, resume, ranks_per_node=ranks):
        assert (result == (1 + 0.75 if ranks > 1 else 0.5 + 0.75)).all()  # one rank alone is the method itself
        if ranks > 1:
            assert (state["late"] == 0).all()
            assert (state[key] == 1).all()  # as at the start


@pytest.mark.parametrize("key", ["velocity", "momentum"])
def test_other_ranks_continue_from_means_of_errors_and_of_other_state(key: str) -> None:
    def train(comm: Communicator) -> Any:
        aggregator = Late(key).start(comm, N)
        aggregator.aggregate(np.full(N, 4 * comm.rank, np.float32))
        return aggregator.state_dict(), aggregator.state_kinds

    states, kinds = zip(*run_local(3, train), strict=True)
    for state in redistribute(states, 2, kinds[0]):
        assert (state["late"] == 2).all()
        assert (state[key] == 2.5).all()


@pytest.mark.parametrize("key", ["velocity", "momentum"])
def test_copies_for_survivors_have_the_errors_and_no_other_state(key: str) -> None:
    class Elastic:
        """A communicator whose ranks may die, as far as copies are made from it."""

        options, recovery = SimpleNamespace(copy_residuals_every=1), True

        def __init__(self, comm: Communicator) -> None:
            self._comm = comm

        def __getattr__(self, name: str) -> Any:
            return getattr(self._comm, name)

    def work(comm: Communicator) -> Any:
        aggregator = Late(key).start(comm, N)
        copies = make_copies(Elastic(comm), aggregator.algorithm, aggregator.driver, aggregator.feedback)  # type: ignore[arg-type]
        return copies and copies.keys

    assert run_local(2, work) == [["late", "residual"]] * 2


@pytest.mark.parametrize("name", METHODS)
def test_all_methods_have_the_errors_pending_that_they_keep(name: str) -> None:
    def work(comm: Communicator) -> Any:
        feedback = METHODS[name].start(comm, N).feedback
        return feedback.pending_keys & feedback.state().keys(), ERRORS & feedback.state().keys()

    (pending, errors), *_ = run_local(2, work)
    assert pending == errors
