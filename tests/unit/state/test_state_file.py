"""States on disk: saved states come back; other files end in one line, in no more memory than their length."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import sys
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from mpicomp.state.state_file import _digest, load_state, save_state
from tests.mutations import HUGE, mutants

STATE: dict[str, Any] = {
    "method": "Marsit",
    "n": 7,
    "step": 3,
    "residual": np.arange(7, dtype=np.float32) / 3,
    "inner": {"list": [1, (2.5, None)], "word": np.array([2**64 - 1], np.uint64), "more": True},
}
TEXT = (
    '{"dict": [["method", "Marsit"], ["n", 7], ["step", 3], ["residual", {"array": "0"}], ["inner", {"dict": '
    '[["list", [1, {"tuple": [2.5, null]}]], ["word", {"array": "1"}], ["more", true]]}]]}'
)
ARRAYS = {"0": STATE["residual"], "1": STATE["inner"]["word"]}


DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"deeper": DEEP, "list": [[[]]]}
NESTED: dict[str, Any] = {
    "step": 2**40,
    "gamma": 0.1 + 0.2,
    "unseen": math.nan,
    "name": "marsit ± ü",
    "path": "\udc80",
    "none": None,
    "flag": True,
    "residual": np.arange(7, dtype=np.float32) / 3,
    "words": np.array([2**64 - 1, 0], np.uint64),
    "empty": np.zeros((0, 3)),
    "texts": np.array(["a", "bc"]),
    "fields": np.zeros((2, 2), [("a", "<i4"), ("b", "<f8")]).T,
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "scalar": np.float64(1) / 3,
    "inner": {"residual": np.full((2, 2), -0.0), "order": [1, (2, "x")], 3: "three"},
    "random": np.random.default_rng(1).bit_generator.state,  # integers of 128 bits
    (1, "tuple"): {None: -(10**63), 2.5: float("inf"), True: ""},
    "deep": DEEP,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def with_header(header: str, content: bytes = b"", version: int = 1) -> bytes:
    """An array in NumPy's format, of whatever header."""
    text = header.encode() + b"\n"
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + content


def header(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


def archive(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)


def signed(text: str, arrays: Mapping[str, Any]) -> dict[str, bytes]:
    """The members of a file whose digest is right."""
    content = text.encode()
    digest = _digest({name: np.asarray(array) for name, array in arrays.items()}, content)
    members = {"state": np.frombuffer(content, np.uint8), "sha256": digest, **arrays}
    return {f"{name}.npy": npy(array) for name, array in members.items()}


def rejected(path: Path, cause: str = "") -> None:
    with pytest.raises(
        ValueError, match=rf"{' '.join(path.name.split())} .*{cause}.*: (load an earlier one|name a file that)"
    ) as caught:
        load_state(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def told(path: Path, state: Any = None) -> bool:
    """Return whether one line rejects the file; else it holds a dict, and the same state if one is given."""
    try:
        found = load_state(path)
    except ValueError as error:
        text = str(error)
    else:
        assert isinstance(found, dict)
        assert state is None or str(found) == str(state)
        return False
    assert text.isprintable()
    assert str(path) in text
    return True


@contextmanager
def less_memory_than(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other)
    else:
        assert one == other
        assert isinstance(one, np.generic) or type(one) is type(other)


# Contents of states --------------------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was(path: Path) -> None:
    save_state(path, NESTED)
    assert_same(load_state(path), load_state(str(path)))
    assert_same(NESTED, load_state(path))
    assert list(path.parent.iterdir()) == [path]


def test_a_file_is_replaced_whole_or_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(path, {"step": 1})
    save_state(path, {"step": 2})
    assert load_state(path) == {"step": 2}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot be written \(No space left on device\): make room there.*state"):
        save_state(path, {"step": 3})
    assert load_state(path) == {"step": 2}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([None, 3]), 1j, -(10**64)])
def test_what_cannot_be_stored_is_named_and_nothing_written(path: Path, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="cannot pack a") as caught:
        save_state(path, {"inner": {"x": value}})
    assert isinstance(caught.value, ValueError) == isinstance(value, int)
    assert not list(path.parent.iterdir())


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads change places also within calls of C functions: whenever these make garbage collection run."""

    def pause(_phase: str, _info: dict[str, int]) -> None:
        time.sleep(0)

    between, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    gc.callbacks.append(pause)
    yield
    gc.callbacks.remove(pause)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(between)


@pytest.mark.usefixtures("restless")
def test_threads_read_states_at_the_same_time(path: Path) -> None:
    save_state(path, STATE)
    with ThreadPoolExecutor(4) as threads:
        for state in threads.map(load_state, [path] * 40):
            assert_same(STATE, state)


# Files that `save_state` did not write ------------------------------------------------------------------------------


def test_the_files_of_these_tests_are_states_but_for_their_faults(path: Path) -> None:
    archive(path, signed(TEXT, ARRAYS))
    assert_same(STATE, load_state(path))


def test_a_truncated_file_is_told_at_any_length(path: Path) -> None:
    save_state(path, STATE)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        rejected(path, "is truncated, altered or no state")


def test_a_flipped_bit_is_told_or_changes_nothing(path: Path) -> None:
    """The text stands in a date, for example."""
    save_state(path, STATE)
    whole, count = path.read_bytes(), 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        count += told(path, STATE)
    assert count > len(whole) / 2


def test_whatever_bytes_a_file_has_it_is_the_state_or_one_line(path: Path) -> None:
    save_state(path, STATE)
    whole, draw = path.read_bytes(), Random(3)
    for _ in range(1500):
        changed = bytearray(whole)
        for _ in range(draw.choice((1, 2, 8))):
            at = draw.randrange(len(changed))
            match draw.randrange(4):
                case 0:
                    changed[at] = draw.randrange(256)
                case 1:
                    changed[at : at + 4] = draw.choice((b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f"))
                case 2:
                    del changed[at : at + draw.randrange(40)]
                case _:
                    changed[at:at] = changed[draw.randrange(len(changed)) :][: draw.randrange(60)]
        path.write_bytes(changed)
        told(path, STATE)


def test_whatever_a_text_says_it_is_a_state_or_one_line(path: Path) -> None:
    for text in mutants(json.loads(TEXT), 1500):
        archive(path, signed(text, ARRAYS))
        told(path)


def test_a_value_that_was_exchanged_behind_the_archives_back_is_told(path: Path) -> None:
    archive(path, signed(TEXT, ARRAYS) | {"0.npy": npy(ARRAYS["0"] + 1)})
    rejected(path, r"is altered \(its SHA-256 is not the one it names\)")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_file_takes_no_memory(path: Path, compression: int) -> None:
    """Of 50 KB at most, and 50 MB if it were read."""
    archive(path, signed('{"dict": [["a", {"array": "0"}]]}', {"0": np.zeros(50_000_000, np.uint8)}), compression)
    assert path.stat().st_size < 100_000
    with less_memory_than(5_000_000):
        rejected(path, "is compressed")


@pytest.mark.parametrize(
    "member",
    [
        with_header(header("(1000000000000,)")),
        with_header(header("(2500000000,)"), b"1234"),
        with_header(header("(10000000000000000000, 0)")),
        with_header(header(f"({HUGE},)")),
        with_header(header("(-1,)")),
        with_header(header("(-1, -1)"), b"1234"),
        with_header(header("(1000000, 1000000, 0)"), b"1234"),
        with_header(header("(1,)", "'<V2147483647'"), b"1234"),
        with_header(header("()", "('<f4', (500000, 1000))"), b"1234"),
        with_header(header("(1,)"), b"12345"),
        with_header(header("(1,)"), b"123"),
        with_header(header("(1000000000000000,)", "'<U0'")),
        with_header(header("(1,)", "'|O'"), b"12345678"),
        with_header("(" * 9000),
        with_header("[" * 60_000, b"", 2),
        with_header("{'descr': '<f4', 'shape': (1,)}", b"1234"),
        with_header("__import__('os').getpid()", b"1234"),
        with_header(header("1"), b"1234"),
        with_header(header("(True,)"), b"1234"),
        with_header(header("(1,)", "'nonsense'"), b"1234"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"{" * 100,
        b"\x93NUMPY\x09\x00" + b" " * 100,
        b"\x80\x04\x95",
        b"",
    ],
)
def test_an_array_that_is_not_as_long_as_it_says_takes_no_memory(path: Path, member: bytes) -> None:
    archive(path, signed(TEXT, ARRAYS) | {"0.npy": member})
    with less_memory_than(20_000_000):
        rejected(path, "is truncated, altered or no state")


def test_members_that_share_their_bytes_are_counted_before_they_are_read(path: Path) -> None:
    """The directory of an archive may name one member many times, of 1 MB here each."""
    archive(path, {"0.npy": npy(np.zeros(1_000_000, np.uint8))})
    whole = path.read_bytes()
    start = whole.rindex(b"PK\x01\x02")
    entry, end = whole[start : whole.rindex(b"PK\x05\x06")], whole[whole.rindex(b"PK\x05\x06") :]
    entries = b"".join(entry.replace(b"0.npy", f"{number}.npy".encode()) for number in range(10))
    ten = (10).to_bytes(2, "little")
    path.write_bytes(whole[:start] + entries + end[:8] + ten * 2 + len(entries).to_bytes(4, "little") + end[16:])
    with zipfile.ZipFile(path) as file:
        assert len(file.infolist()) == 10
    rejected(path, "its members are 100012")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_occurs_twice_is_told(path: Path) -> None:
    for second in ("0.npy", "0"):
        with zipfile.ZipFile(path, "w") as file:
            for name, content in (*signed(TEXT, ARRAYS).items(), (second, npy(np.zeros(7, np.float32)))):
                file.writestr(name, content)
        rejected(path, "a member occurs more than once")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested deeper than 3000"),
        ("[" * 2900 + "]" * 2900, "nested too deep"),
        ("[" * 600 + "]" * 600, "nested too deep"),
        ('{"dict": [["step", ' + HUGE + "]]}", "401 characters"),
        ('{"dict": [["step", 1e400]]}', "beyond the range of float64"),
        ('{"dict": [["a", 1], ["a", 2]]}', "a key occurs more than once in a dict"),
        ('{"dict": [], "dict": []}', "occurs more than once in an object"),
        ('{"dict": [[[], 1]]}', "a key is a list"),
        ('{"dict": [[{"array": "0"}, 1]]}', "a key is a list, a dict or an array"),
        ('{"dict": [["a"]]}', "is no value of a state"),
        ('{"dict": {"a": 1}}', "is no value of a state"),
        ('{"dict": 1}', "is no value of a state"),
        ('{"tuple": null}', "is no value of a state"),
        ("{}", "neither a value nor a place of one"),
        ('{"array": "0", "tuple": []}', "neither a value nor a place of one"),
        ('{"array": 0}', "is no value of a state"),
        ('{"dict": [["a", {"array": "7"}]]}', "the array '7' is missing"),
        ('{"dict": [["a", {"array": "state"}]]}', "the array 'state' is missing"),
        ('{"tensor": "0"}', "is no value of a state"),
        ("[]", r"it is \[\], not a dict"),
        ('{"array": "0"}', "it is array"),
        ("null", "it is None, not a dict"),
        ("", "Expecting value"),
    ],
)
def test_a_text_with_a_right_digest_that_is_no_state_is_told(path: Path, text: str, cause: str) -> None:
    archive(path, signed(text, ARRAYS))
    rejected(path, cause)


def test_other_files_are_no_states(tmp_path: Path) -> None:
    path = tmp_path / "some\nstate"
    with pytest.raises(FileNotFoundError):
        load_state(path)
    for content in (b"", b"PK", b"a text", np.lib.format.MAGIC_PREFIX, npy(np.ones(3))):
        path.write_bytes(content)
        rejected(path)
    archive(path, {"residual.npy": npy(np.ones(3))})
    rejected(path, "holds no state")
    good = signed(TEXT, ARRAYS)
    archive(path, good | {"state.npy": npy(np.array([{"pickled": 1}], object))})
    rejected(path)
    for name in good:
        archive(path, {other: content for other, content in good.items() if other != name})
        rejected(path)
    for wrong in (np.zeros(32), np.zeros((2, 16), np.uint8), np.zeros((), "<U5"), np.zeros(3, "V3"), np.float64(1)):
        for name in good:
            archive(path, good | {name: npy(wrong)})
            rejected(path)
    archive(path, good | {"state.npy": npy(np.frombuffer(b"\xff\xfe", np.uint8))})
    rejected(path)
    archive(path, good | {"\n\x1b": b""})
    rejected(path)


def test_a_damaged_directory_is_told(path: Path) -> None:
    """Lengths in the archive's directory that are not those of its members."""
    archive(path, signed(TEXT, ARRAYS))
    whole = path.read_bytes()
    crc = zlib.crc32(npy(ARRAYS["0"])).to_bytes(4, "little")
    at = whole.rindex(crc) + 4
    for lengths in ((2**31, 2**31), (2**32 - 2, 2**32 - 2), (0, 0), (100, 100), (10**6, 200)):
        changed = b"".join(length.to_bytes(4, "little") for length in lengths)
        path.write_bytes(whole[:at] + changed + whole[at + 8 :])
        rejected(path)
