"""The first page of a store's file: whose it is, and whether all that was written to it is whole.

0      magic, version, length and CRC-32 of a JSON text (20 bytes), and the text
4080   number that the files of both ends of a cut share, uint64; 0: none yet
4088   whether the rows are whole: a process that is about to write says so first
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from collectives.json_file import parse_json
from collectives.quoting import one_line, shown

PAGE = 4096
MAKING = b"mpicNEW\n"  # instead of the magic, until the file is complete for the first time
CLEAN_AT, CLEAN, UNCLEAN = PAGE - 8, b"whole..\n", b"writing\n"
PAIR_AT, PAIR = CLEAN_AT - 8, struct.Struct("<Q")
_MAGIC, _VERSION = b"mpicMSG\n", 1
_HEAD = struct.Struct("<8sIII")


def packed(description: Mapping[str, Any], name: str) -> bytes:
    """What a file begins with.

    Raises
    ------
    ValueError
        The description does not fit.
    """
    text = json.dumps(_with_byte_order(description)).encode()
    if _HEAD.size + len(text) > PAIR_AT:
        raise ValueError(f"{name}: a store's description has {len(text)} characters: shorten its fingerprint")
    return _HEAD.pack(_MAGIC, _VERSION, len(text), zlib.crc32(text)) + text


def is_clean(page: bytes, size: int, expected: int, description: Mapping[str, Any], name: str) -> bool:
    """Whether the rows of a file are known to be whole, after comparing it with what it should be.

    Parameters
    ----------
    page : bytes
        The first of the file, or all of it if it is shorter.
    size, expected : int
        Length of the file.
    description : dict
        JSON values that the file must have been made with. "fingerprint" is told apart in messages.
    name : str
        Of the file, for messages.

    Raises
    ------
    ValueError
        The file is no store, another one's, or damaged.
    """
    if not page.startswith(_MAGIC):
        raise ValueError(f"{name} is no store of messages: name another file")
    if len(page) < PAGE:
        raise _damaged(name, f"it ends after {len(page)} bytes")
    _, version, length, check = _HEAD.unpack_from(page)
    if version != _VERSION:
        raise ValueError(f"{name} is a store of version {version}, and this is {_VERSION}: remove it")
    text = page[_HEAD.size : _HEAD.size + length]
    if zlib.crc32(text) != check or length > CLEAN_AT - _HEAD.size:
        raise _damaged(name, "its first page has another checksum than it names")
    try:
        found = parse_json(text.decode())
    except ValueError as error:
        raise _damaged(name, one_line(error)) from error
    _compare(found, _with_byte_order(description), name)
    if size != expected:
        raise _damaged(name, f"it has {size} of {expected} bytes")
    if page[CLEAN_AT:] not in (CLEAN, UNCLEAN):
        raise _damaged(name, "the end of its first page has been overwritten")
    return page[CLEAN_AT:] == CLEAN


def _compare(found: Any, wanted: Mapping[str, Any], name: str) -> None:
    held = found if isinstance(found, dict) else {}
    if held.get("fingerprint") != wanted["fingerprint"]:
        raise ValueError(
            f"{name} is the store of another run or model (its fingerprint is {shown(held.get('fingerprint'))}, this "
            f"one's {shown(wanted['fingerprint'])}): name another file, or remove this one"
        )
    for key, value in wanted.items():
        if held.get(key) != value:
            raise ValueError(
                f"{name} is a store whose {key} is {shown(held.get(key))}, and {shown(value)} is asked for: name "
                "another file, or remove this one"
            )


def _with_byte_order(description: Mapping[str, Any]) -> dict[str, Any]:
    return {**description, "byteorder": sys.byteorder}


def _damaged(name: str, cause: str) -> ValueError:
    return ValueError(f"{name} is damaged ({cause}): remove it, and messages are sent in full precision again")
