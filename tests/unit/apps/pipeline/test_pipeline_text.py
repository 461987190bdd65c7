"""Texts become sequences of characters, of which some are held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apps.pipeline.text import HELD_OUT_EVERY, OTHER, SYMBOLS, encode, load


def test_each_symbol_has_a_number_of_its_own_and_all_others_share_one() -> None:
    assert encode(SYMBOLS).tolist() == list(range(len(SYMBOLS)))
    assert encode("é\u4e00\U0001f600").tolist() == [OTHER] * 3
    assert encode("\t").tolist() == encode("    ").tolist()


def test_sequences_follow_each_other_and_share_one_character(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("".join(SYMBOLS[1 + k % 90] for k in range(401)))
    corpus = load(path, 10_000, 20)
    joined = np.empty((20, 21), np.int64)
    held_out = np.arange(20) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    joined[held_out], joined[~held_out] = corpus.validation, corpus.training
    assert (joined[1:, 0] == joined[:-1, -1]).all()
    assert (joined[:, :-1].reshape(-1) == encode(path.read_text())[:400]).all()


def test_the_standard_library_is_the_text_by_default() -> None:
    corpus = load(None, 50_000, 32)
    assert (len(corpus.training) + len(corpus.validation)) * 32 <= 50_000 < 32 * 1.1 * len(corpus.training) + 10_000
    assert corpus.digest == load(None, 50_000, 32).digest != load(None, 40_000, 32).digest


def test_the_beginning_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("x" * 100 + "y" * 200)
    corpus = load(path, 200, 10, skip=100)
    assert (corpus.training == SYMBOLS.index("y")).all()


def test_a_text_that_is_too_short_is_refused_with_the_length_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text("x" * 50)
    with pytest.raises(ValueError, match=r"short has 50 characters, .* take a text of 81 or more"):
        load(path, 10_000, 8)


def test_a_missing_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        load(tmp_path / "nowhere", 1000, 8)
