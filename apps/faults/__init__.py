"""Failures as data: schedules of faults, and the injector that makes them happen in the ranks of a job."""

from apps.faults.fault import Fault, Kind, Phase, corrupt_at, disk_full_at, fail_at, slow_at, stop_at
from apps.faults.injector import Injector
from apps.faults.schedule import parse_schedule, random_faults, write_schedule

__all__ = [
    "Fault",
    "Injector",
    "Kind",
    "Phase",
    "corrupt_at",
    "disk_full_at",
    "fail_at",
    "parse_schedule",
    "random_faults",
    "slow_at",
    "stop_at",
    "write_schedule",
]
