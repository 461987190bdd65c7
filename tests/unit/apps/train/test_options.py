"""The command line of apps.train."""

from __future__ import annotations

import pytest

from apps.train.options import identity, parse


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("", "algorithm_options", {}),
        ("--option clip=0.5 --option compensation=False", "algorithm_options", {"clip": 0.5, "compensation": False}),
        ("--option global_step=auto", "algorithm_options", {"global_step": "auto"}),
        ("--full-precision-every 50", "algorithm_options", {"full_precision_every": 50}),
        ("--full-precision-every none", "algorithm_options", {"full_precision_every": None}),
        ("--residual paper", "algorithm_options", {"residual": "paper"}),
        ("", "optimizer", "momentum"),
        ("--algorithm one-bit-adam", "optimizer", "adam"),
        ("--method one-bit-adam", "optimizer", "adam"),
        ("--algorithm one-bit-adam --option bits=4", "lr", 0.001),
        ("--optimizer adam", "lr", 0.001),
        ("--optimizer adam --lr 0.5", "lr", 0.5),
        ("--checkpoint-every 3", "checkpoint_every", (3, "epochs")),
        ("--checkpoint-every 500steps", "checkpoint_every", (500, "steps")),
    ],
)
def test_options_are_read_as_they_are_meant(argv: str, name: str, value: object) -> None:
    assert getattr(parse(argv.split()), name) == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epochs", "0"], "0 is not at least 1"),
        (["--lr", "nan"], "nan is not positive"),
        (["--seed", "1" + "0" * 30], "is beyond 1000000000000"),
        (["--option", "clip"], "--option clip: write it as key=value"),
        (["--checkpoint-every", "5minutes"], "neither a number of epochs nor like 500steps"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--spares", "1"], "--spares needs --on-failure regroup"),
        (["--keep-batch"], "--keep-batch needs --on-failure regroup"),
        (["--spares", "1", "--on-failure", "regroup", "--per-node"], "--per-node takes no newcomers"),
        (["--decay", "step"], "--decay step needs --decay-epochs"),
        (["--algorithm", "one-bit-adam", "--optimizer", "sgd"], "leave out --optimizer"),
        (["--algorithm", "one-bit-adam", "--local-steps", "2"], "leave out --optimizer, --synchronize, --local-steps"),
        (["--dataset", "imagenet"], "invalid choice: 'imagenet'"),
    ],
)
def test_wrong_usage_ends_with_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_resumed_run_may_be_longer_unless_the_schedule_knows_its_end() -> None:
    assert identity(parse(["--epochs", "2"])) == identity(parse(["--epochs", "4", "--json", "x"]))
    cosine = ["--decay", "cosine", "--epochs"]
    assert identity(parse([*cosine, "2"])) != identity(parse([*cosine, "4"]))
    assert identity(parse(["--lr", "0.1"])) != identity(parse(["--lr", "0.2"]))
