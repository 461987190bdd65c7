"""The command line of apps.train."""

from __future__ import annotations

import pytest

from apps.train.options import identity, parse


def test_method_options_are_parsed_as_python_literals_or_text() -> None:
    options = parse(["--option", "clip=0.5", "--option", "global_step=auto", "--option", "compensation=False"])
    assert options.algorithm_options == {"clip": 0.5, "global_step": "auto", "compensation": False}


def test_full_precision_every_takes_a_period_or_none() -> None:
    assert parse(["--full-precision-every", "50"]).algorithm_options == {"full_precision_every": 50}
    assert parse(["--full-precision-every", "none"]).algorithm_options == {"full_precision_every": None}
    assert parse([]).algorithm_options == {}


def test_residual_is_an_option_of_the_method() -> None:
    assert parse(["--residual", "paper"]).algorithm_options == {"residual": "paper"}


def test_the_learning_rate_defaults_to_the_optimizers() -> None:
    assert parse(["--optimizer", "adam"]).lr == 0.001
    assert parse(["--optimizer", "adam", "--lr", "0.5"]).lr == 0.5


def test_checkpoints_are_timed_in_epochs_or_steps() -> None:
    assert parse(["--checkpoint-every", "3"]).checkpoint_every == (3, "epochs")
    assert parse(["--checkpoint-every", "500steps"]).checkpoint_every == (500, "steps")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epochs", "0"], "0 is not at least 1"),
        (["--lr", "nan"], "nan is not positive"),
        (["--seed", "1" + "0" * 30], "is beyond 1000000000000"),
        (["--option", "clip"], "--option clip: write it as key=value"),
        (["--checkpoint-every", "5minutes"], "neither a number of epochs nor like 500steps"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--decay", "step"], "--decay step needs --decay-epochs"),
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
