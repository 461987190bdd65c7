"""Files that `save_state` did not write: one line, and no more memory than they are long."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from mpicomp.checkpoint.state import _digest, load_state, save_state
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


def rejected(path: Path, cause: str = "") -> str:
    with pytest.raises(
        ValueError, match=rf"{' '.join(path.name.split())} .*{cause}.*: (load an earlier one|name a file that)"
    ) as caught:
        load_state(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_the_files_of_these_tests_are_states_but_for_their_faults(tmp_path: Path) -> None:
    path = tmp_path / "state"
    archive(path, signed(TEXT, ARRAYS))
    found = load_state(path)
    save_state(path, STATE)
    again = load_state(path)
    assert str(found) == str(again) == str(STATE)


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_file_takes_no_memory(tmp_path: Path, compression: int) -> None:
    """Of 50 KB at most, and 50 MB if it were read."""
    path = tmp_path / "state"
    archive(path, signed('{"dict": [["a", {"array": "0"}]]}', {"0": np.zeros(50_000_000, np.uint8)}), compression)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        rejected(path, "is compressed")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


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
def test_an_array_that_is_not_as_long_as_it_says_takes_no_memory(tmp_path: Path, member: bytes) -> None:
    path = tmp_path / "state"
    archive(path, signed(TEXT, ARRAYS) | {"0.npy": member})
    tracemalloc.start()
    try:
        rejected(path, "is truncated, altered or no state")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_members_that_share_their_bytes_are_counted_before_they_are_read(tmp_path: Path) -> None:
    """The directory of an archive may name one member many times, of 1 MB here each."""
    path = tmp_path / "state"
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
def test_a_member_that_occurs_twice_is_told(tmp_path: Path) -> None:
    path = tmp_path / "state"
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
def test_a_text_with_a_right_digest_that_is_no_state_is_told(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "state"
    archive(path, signed(text, ARRAYS))
    rejected(path, cause)


def test_other_members_are_no_states(tmp_path: Path) -> None:
    path = tmp_path / "some\nstate"
    good = signed(TEXT, ARRAYS)
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


def test_whatever_a_text_says_it_is_a_state_or_one_line(tmp_path: Path) -> None:
    path, told = tmp_path / "state", 0
    for text in mutants(json.loads(TEXT), 1500):
        archive(path, signed(text, ARRAYS))
        try:
            found = load_state(path)
        except ValueError as error:
            told += str(error).isprintable() and str(path) in str(error)
        else:
            told += isinstance(found, dict)
    assert told == 1500


def test_whatever_bytes_a_file_has_it_is_a_state_or_one_line(tmp_path: Path) -> None:
    path, told, draw = tmp_path / "state", 0, Random(3)
    save_state(path, STATE)
    whole = path.read_bytes()
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
        try:
            found = load_state(path)
        except ValueError as error:
            told += str(error).isprintable() and str(path) in str(error)
        else:
            told += str(found) == str(STATE)  # in a date, say
    assert told == 1500


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "state"
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"deeper": deep, "list": [[[]]]}
    odd = {
        "random": np.random.default_rng(1).bit_generator.state,  # integers of 128 bits
        "path": "\udc80",
        (1, "tuple"): {None: -(10**63), 2.5: float("inf"), True: b"".decode()},
        "arrays": [np.zeros((0, 3)), np.array(["a", "bc"]), np.zeros((2, 2), [("a", "<i4"), ("b", "<f8")]).T],
        "dates": np.array(["2020-01-01"], "datetime64[D]"),
        "deep": deep,
    }
    save_state(path, odd)
    assert repr(load_state(path)) == repr(odd)
    with pytest.raises(ValueError, match="cannot pack an integer of more than 64 digits"):
        save_state(path, {"step": -(10**64)})
    assert repr(load_state(path)) == repr(odd)


def test_a_damaged_directory_is_told(tmp_path: Path) -> None:
    """Lengths in the archive's directory that are not those of its members."""
    path = tmp_path / "state"
    archive(path, signed(TEXT, ARRAYS))
    whole = path.read_bytes()
    crc = zlib.crc32(npy(ARRAYS["0"])).to_bytes(4, "little")
    at = whole.rindex(crc) + 4
    for lengths in ((2**31, 2**31), (2**32 - 2, 2**32 - 2), (0, 0), (100, 100), (10**6, 200)):
        changed = b"".join(length.to_bytes(4, "little") for length in lengths)
        path.write_bytes(whole[:at] + changed + whole[at + 8 :])
        rejected(path)
