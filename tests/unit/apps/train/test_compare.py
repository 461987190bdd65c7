"""The program that trains in several ways and compares them."""

from __future__ import annotations

import pytest

from apps.train import compare


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("0", "--ranks: 0 is not at least 1"),
        ("-2", "--ranks: -2 is not at least 1"),
        ("2.5", "--ranks: '2.5' is not a whole number"),
        ("1000000", "--ranks: 1000000 are more than 16 for each core of this machine"),
    ],
)
def test_numbers_of_ranks_that_cannot_be_are_refused(
    ranks: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(["--ranks", ranks])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
