"""JSON within limits: any file of another kind ends in one line."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from collectives.json_file import fields, parse_json, read_json
from collectives.quoting import listed, one_line, shown


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "Expecting value"),
        ("[1,", "Expecting value"),
        ("{} {}", "Extra data"),
        ("\ufeff{}", "BOM"),
        ("[" * 100_000, "nested deeper than 100 levels"),
        ("[" * 100_000 + "]" * 100_000, "nested deeper than 100 levels"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested deeper than 100 levels"),
        ("1" + "0" * 400, "an integer has 401 characters, more than 18 digits"),
        ("-1" + "0" * 5000, "more than 18 digits"),
        ("[10000000000000000000]", "more than 18 digits"),
        ('{"a": 1e400}', "the number '1e400' is beyond the range of float64"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs more than once"),
        (r'["\ud800"]', "half of a surrogate pair"),
        (r'{"\udfff": 1}', "half of a surrogate pair"),
    ],
)
def test_a_text_beyond_the_limits_is_one_error_of_one_line(text: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause) as caught:
        parse_json(text)
    assert type(caught.value) is ValueError or isinstance(caught.value, json.JSONDecodeError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "text", {"b": []}], "c": -(10**17)},
        999_999_999_999_999_999,
        '"[[[{{{' * 1000,
        "\\" * 999 + '"',
        "\U0001f600 ü",
        math.inf,
        5e-324,
    ],
)
def test_what_python_writes_is_read_as_it_was(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False)) == value


def test_limits_are_the_callers() -> None:
    deep = "[" * 150 + "]" * 150
    assert parse_json(deep, most_depth=150) == json.loads(deep)
    assert parse_json("9" * 40, most_digits=40) == 10**40 - 1
    assert parse_json("[" * 100 + "]" * 100) == json.loads("[" * 100 + "]" * 100)


def test_a_text_of_quotes_is_judged_in_linear_time() -> None:
    """A scanner that started again at each escaped quote would take ten seconds."""
    begun = time.process_time()
    with pytest.raises(ValueError, match="Unterminated string"):
        parse_json('"' + '\\"' * 40_000)
    assert time.process_time() - begun < 2


def test_a_text_deeper_than_the_stack_is_an_error_of_one_line() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json("[" * 50_000 + "]" * 50_000, most_depth=100_000)


def test_a_file_is_named_with_cause_and_cure(tmp_path: Path) -> None:
    path = tmp_path / "some\nfile.json"
    for content, cause in (
        (b"{", "Expecting"),
        (b"\xff\xfe", "decode"),
        (b" " * 1001 + b"1", "longer than 1000 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"some file.json is not JSON .*{cause}.*\); make another$") as caught:
            read_json(path, "make another", most_bytes=1000)
        assert "\n" not in str(caught.value)
    path.write_text('{"a": "ü"}', encoding="utf-8")
    assert read_json(path, "make another") == {"a": "ü"}
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none", "make another")


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        ([], r"it is \[\], not an object"),
        ({"n": 1}, "it has no 'x'"),
        ({"n": True, "x": 1.0}, "its 'n' is True, not an integer"),
        ({"n": 1.0, "x": 1.0}, "its 'n' is 1.0, not an integer"),
        ({"n": 1, "x": "1"}, "its 'x' is '1', not a number or null"),
        ({"n": 1, "x": False}, "its 'x' is False, not a number or null"),
    ],
)
def test_an_object_of_another_form_is_told_by_its_key(found: Any, cause: str) -> None:
    with pytest.raises(ValueError, match=f"^{cause}$"):
        fields(found, n=int, x=(float, type(None)))


def test_an_object_may_have_integers_for_floats_and_more_keys() -> None:
    found = {"n": 1, "x": 2, "more": []}
    assert fields(found, n=int, x=float) is found
    assert fields({"x": None}, x=(float, type(None))) == {"x": None}


def test_a_quoted_value_is_short_and_printable() -> None:
    for value in ("\ud800\n" * 1000, 10**5000, [[["deep"] * 1000] * 1000], {"\n": "\x1b[31m"}):
        assert len(shown(value)) < 500
        assert shown(value).isprintable()
        shown(value).encode()
    assert one_line("a\n b \ud800 \0ü") == "a b \\ud800 \\x00ü"
    assert listed({"b": 1, "a\n": 2, 3: 4}) == "3, a, b"
    assert len(listed(map(str, range(1000)))) < 400
