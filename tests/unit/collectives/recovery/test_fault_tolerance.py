"""Notices of deaths, which the launcher gives to MPI."""

from __future__ import annotations

import os
import time

import pytest
from mpi4py import MPI

from collectives.recovery import fault_tolerance


def test_no_notice_is_awaited_once_the_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_tolerance, "_launcher", os.getppid() + 1)
    start = time.monotonic()
    assert fault_tolerance.describe_failed(MPI.COMM_SELF, wait_s=60.0) == ""
    assert not fault_tolerance.await_death(MPI.COMM_SELF)
    assert time.monotonic() - start < fault_tolerance.LONGEST_NOTICE_S
