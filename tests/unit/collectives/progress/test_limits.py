"""Where a communicator's timeouts come from."""

from __future__ import annotations

import pytest

from collectives.progress.limits import timeouts


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
