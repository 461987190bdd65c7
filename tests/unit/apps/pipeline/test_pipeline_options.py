"""Options of runs, and refused ones."""

from __future__ import annotations

import pytest

from apps.pipeline.options import Options, parse
from mpicomp.codecs.rows import FullRows, RowQuantizer
from mpicomp.pipeline import Deltas, Direct


def test_defaults_of_the_command_line_are_those_of_options() -> None:
    assert parse([]).options == Options()


def test_options_of_the_command_line_are_taken() -> None:
    found = parse(
        ["--stages", "2", "--replicas=3", "--forward-bits=4", "--gradient-bits=4", "--direct", "--micro-batches=4"]
    )
    assert found.options == Options(stages=2, replicas=3, forward_bits=4, gradient_bits=4, direct=True, micro_batches=4)


@pytest.mark.parametrize(
    ("options", "forward", "backward", "name"),
    [
        (Options(), Deltas(RowQuantizer(3), 10), RowQuantizer(6, scale="float32"), "AQ-SGD fw3 bw6"),
        (Options(direct=True), Direct(RowQuantizer(3)), RowQuantizer(6, scale="float32"), "DirectQ fw3 bw6"),
        (Options(forward_bits=32, backward_bits=32), Direct(FullRows()), FullRows(), "fp32"),
        (Options(forward_bits=16, backward_bits=16), Direct(FullRows("float16")), FullRows("float16"), None),
    ],
)  # fmt: skip
def test_bits_choose_how_activations_and_gradients_travel(
    options: Options, forward: object, backward: object, name: str | None
) -> None:
    found = options.forward(10, None)
    if isinstance(found, Deltas):
        assert (found.codec, found.examples, found.folder) == (RowQuantizer(3), 10, None)
    else:
        assert found == forward
    assert options.backward() == Direct(backward)
    assert name in (None, options.name)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--batch 30 --micro-batches 8", "--batch 30 does not divide into --micro-batches 8"),
        ("--width 30 --heads 4", "--width 30 does not divide into --heads 4"),
        ("--stages 5", "--stages 5 need as many --layers, not 4"),
        ("--resume", "--resume needs --checkpoint DIR"),
        ("--store disk", "--store disk needs --checkpoint DIR"),
        ("--forward-bits 9", "invalid choice"),
        ("--stages 0", "0 is not at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments.split())
    assert told in capsys.readouterr().err
