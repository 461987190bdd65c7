"""The table of young methods' options, and its program."""

from __future__ import annotations

import mpicomp
from apps.appendices import replace_block
from apps.method_options import PAGE, describe_options, make_table


def test_the_table_of_options_is_that_of_the_registrations() -> None:
    text = PAGE.read_text()
    assert replace_block(text, "options", make_table()) == text, "write it by: python -m apps.method_options"


def test_parameters_that_share_a_text_have_it_each() -> None:
    texts = describe_options(mpicomp.ECQSGD)
    assert texts["levels"] == texts["coding"] == "As in `QSGD`."
    assert texts["beta"].endswith("from step to step, 0 to 1.")
