"""pytest under mpirun: every rank runs every test, and all ranks agree on its outcome.

Rank 0 prints for all; the other ranks are silent. Without this, the rank that fails leaves the test, the others wait
for it in the next collective, and the launcher's output shows a hang instead of the cause.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol
from mpi4py import MPI

from tests.harness.verdict import Verdict, allgather, judge
from tests.harness.watchdog import Watchdog

# How long the other ranks may still take for a test that this rank has failed: they are likely to wait for it.
STRAGGLERS_S = 5.0
# Ranks import at their own pace: eight on two cores, each compiling and loading torch.
COLLECTION_S = 180.0
CAPTURED_CHARACTERS = 8000


class Idle(pytest.skip.Exception):
    """Raised on the ranks outside a test's sub-communicator: they take no part, and that is no skip."""


class RankAgreement:
    """The pytest plugin of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self._lent: list[MPI.Intracomm] = []
        self._config = config
        self._collection_error = ""
        folder = tempfile.mkdtemp(prefix="mpitest-") if self.rank == 0 else ""
        self._folder = Path(self.comm.bcast(folder))
        self._watchdog = Watchdog(self.rank, self.size, self._folder / "job-is-ending", self._release_output)
        # Ranks must not race for pytest's numbered folders.
        config.option.basetemp = self._folder / f"rank{self.rank}"

    # -- one voice --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if self.rank != 0 and reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: PTH123, SIM115

    def pytest_report_header(self) -> str:
        name, version = MPI.get_vendor()
        return f"MPI: {name} {'.'.join(map(str, version))}, {self.size} ranks"

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self) -> None:
        for plugin in self._config.pluginmanager.get_plugins():
            if hasattr(plugin, "_is_testing_mpi"):
                plugin._is_testing_mpi = False  # pytest-mpi would print a screenful, a NUL character in it

    def reject(self, message: str) -> NoReturn:
        """End the run on all ranks, which must all call this, with one message."""
        if self.rank == 0:
            raise pytest.UsageError(message)
        pytest.exit(message, returncode=pytest.ExitCode.USAGE_ERROR)

    # -- the same tests on every rank -------------------------------------------------------------------------------

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_error += f"{report.nodeid}: {report.longreprtext}\n"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = [item.nodeid for item in session.items]
        answers = self._allgather((names, self._collection_error), COLLECTION_S, "collecting the tests")
        if not all(error for _, error in answers):  # an error that all ranks share is pytest's to report
            for rank, (_, error) in enumerate(answers):
                if error:
                    self.reject(f"rank {rank} of {self.size} could not collect the tests, others could: {error}")
        for rank, (theirs, _) in enumerate(answers):
            if theirs != answers[0][0]:
                odd = sorted(set(theirs) ^ set(answers[0][0])) or ["the order"]
                self.reject(f"rank {rank} of {self.size} collected other tests than rank 0: {odd[0]} differs")

    # -- the same verdict on every rank -----------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            self._settle(item, reports)
        finally:
            self._watchdog.stop()
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        self._watchdog.start(item.nodeid, settings.timeout)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        return True  # only an agreed verdict ends the watch: pytest-timeout would end it at a rank's first exception

    def _settle(self, item: pytest.Item, reports: Sequence[pytest.TestReport]) -> None:
        mine = self._verdict(reports)
        patience_s = STRAGGLERS_S if mine.outcome == "failed" else float("inf")
        problem = f"{item.nodeid} failed here and goes on elsewhere: {mine.summary}\n{mine.details}"
        failure = judge(self._allgather(mine, patience_s, problem))
        if failure is None:
            for comm in self._lent:
                comm.Free()
            for report in reports:
                if mine.outcome == "idle" and report.skipped:
                    report.outcome, report.longrepr = "passed", None
        else:
            decisive = next((r for r in reports if not r.passed), reports[min(1, len(reports) - 1)])
            decisive.outcome, decisive.longrepr, decisive.sections = "failed", failure, []
        self._lent.clear()  # after a failure messages may still be under way on them: better lost than freed

    def _verdict(self, reports: Sequence[pytest.TestReport]) -> Verdict:
        for report in reports:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                where = f"{crash.path}:{crash.lineno}" if crash else report.nodeid
                summary = crash.message.splitlines()[0] if crash else report.longreprtext[-200:]
                sections = [f"{title}\n{text[-CAPTURED_CHARACTERS:]}" for title, text in report.sections]
                details = "\n".join([report.longreprtext, *sections])
                return Verdict(self.rank, "failed", where, f"{summary} [{report.when}, {where}]", details)
            if report.skipped and not hasattr(report, "wasxfail"):
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
                return Verdict(self.rank, "idle" if Idle.__name__ in reason else "skipped", summary=reason)
        return Verdict(self.rank, "passed")

    def lend(self, n_ranks: int) -> MPI.Intracomm:
        """Return a communicator of the first `n_ranks` ranks, for one test, which ends here on all other ranks.

        Every rank must call this.
        """
        if not 1 <= n_ranks <= self.size:
            raise ValueError(f"a communicator of {n_ranks} ranks asked of a job of {self.size}: say min_size={n_ranks}")
        part = self.comm.Split(0 if self.rank < n_ranks else MPI.UNDEFINED, self.rank)
        if part == MPI.COMM_NULL:
            raise Idle(f"{Idle.__name__}: rank {self.rank} is outside the test's {n_ranks} ranks")
        self._lent.append(part)
        return part

    # -- the end ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # The launcher ends the job when the first rank leaves with an error: rank 0 must have printed by then.
        self._allgather(None, COLLECTION_S, "the end of the run")
        if self.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _allgather(self, value: object, patience_s: float, problem: str) -> list[Any]:
        def waiting(waited_s: float) -> None:
            if waited_s > patience_s:
                self._watchdog.end_job(f"waited {patience_s:g} s for the other ranks: {problem}")

        return allgather(self.comm, value, waiting)

    def _release_output(self) -> str:
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is None:
            return ""
        capture.suspend_global_capture(in_=True)
        return "".join(capture.read_global_capture())[-CAPTURED_CHARACTERS:]
