"""States of aggregators on disk.

A file is an npz archive, read without pickle: the arrays by number, ``state`` with the JSON text of everything else,
and ``sha256`` of all that. Its members are stored as they are. The announced sizes are compared with the file's length
before memory is taken, so a damaged or foreign file takes no more memory than it is long.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import IO, Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile

import numpy as np
from numpy.lib import format as npy

from collectives.annotations import AnyArray, Bytes
from collectives.atomic_file import replacing
from collectives.json_file import parse_json
from collectives.quoting import one_line, shown
from collectives.regular_file import open_regular

State = dict[str, Any]
_TEXT, _DIGEST = "state", "sha256"
# A dict is three levels of the text, and Python's stack ends before a state of a thousand dicts within each other.
MOST_DEPTH = 3000
MOST_DIGITS = 64  # random generators have integers of 39
# NumPy reads headers by `ast.literal_eval`, and CPython 3.11's parser counts the depth of all threads' trees together:
# two at a time may end in a SystemError (python/cpython#106905).
_reading = threading.Lock()


def save_state(path: str | PathLike[str], state: State) -> None:
    """Write a state to a file, which is replaced whole or not at all.

    Parameters
    ----------
    path : str or PathLike
        Of the file; one per rank, in a folder that exists.
    state : dict
        As from ``aggregator.state_dict()``: arrays, numbers, texts, None, and dicts, lists and tuples of these.

    Raises
    ------
    TypeError
        The state has a value of another type.
    ValueError
        The state has an integer of more than 64 digits.
    OSError
        The file cannot be written; names it, and the cure.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> import mpicomp
    >>> with TemporaryDirectory() as folder, mpicomp.Communicator() as comm:
    ...     file = Path(folder, f"rank-{comm.rank}.npz")
    ...     top_k = mpicomp.LocalTopK(rate=2).start(comm, 2)
    ...     mean = top_k.aggregate(np.array([4.0, 3.0], np.float32))
    ...     mpicomp.save_state(file, {"epoch": 7, "aggregator": top_k.state_dict()})
    ...     saved = mpicomp.load_state(file)
    ...     top_k.load_state_dict(saved["aggregator"])
    >>> saved["epoch"], saved["aggregator"]["step"]
    (7, 1)
    """
    arrays, text = split(state, {"array": np.ndarray})
    for array in arrays.values():
        if array.dtype.hasobject:
            raise TypeError(f"cannot pack an array of {array.dtype} into a checkpoint")
    content = text.encode()
    members = {_TEXT: np.frombuffer(content, np.uint8), _DIGEST: _digest(arrays, content), **arrays}
    try:
        with replacing(Path(path)) as file:
            np.savez(file, **members)
    except OSError as error:
        cure = "make room there, or name a file in another folder that exists"
        raise OSError(error.errno, f"cannot be written ({error.strerror}): {cure}", str(path)) from error


def load_state(path: str | PathLike[str]) -> State:
    """Read a file of `save_state`.

    Parameters
    ----------
    path : str or PathLike

    Returns
    -------
    dict
        The state that was saved; tuples are tuples again, NumPy's scalars are numbers of Python.

    Raises
    ------
    ValueError
        `save_state` did not write the file, or it is truncated or altered; one line with the file and the cure.
    OSError
        The file cannot be read.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import mpicomp
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "state.npz")
    ...     mpicomp.save_state(file, {"losses": (0.5, 0.25)})
    ...     mpicomp.load_state(file)
    {'losses': (0.5, 0.25)}
    """
    named = one_line(path)
    with open_regular(path) as file:
        try:
            with _reading:
                members = _read(file)
            text, digest = (members.pop(name, None) for name in (_TEXT, _DIGEST))
            content = b"" if text is None else text.tobytes()
            altered = digest is None or not np.array_equal(digest, _digest(members, content))
        except Exception as error:  # any error of zipfile and NumPy on foreign bytes
            reason = one_line(error) or type(error).__name__
            raise ValueError(f"{named} is truncated, altered or no state ({reason}): load an earlier one") from error
    if text is None or digest is None:
        raise ValueError(f"{named} holds no state: name a file that save_state wrote")
    if altered:
        raise ValueError(f"{named} is altered (its SHA-256 is not the one it names): load an earlier one")
    try:
        state = join(content.decode(), {"array": members.__getitem__})
        if not isinstance(state, dict):
            raise ValueError(f"it is {shown(state)}, not a dict")
    except ValueError as error:
        raise ValueError(
            f"{named} holds no state that save_state wrote ({one_line(error)}): load an earlier one"
        ) from error
    return state


def _read(file: BinaryIO) -> dict[str, AnyArray]:
    """Read the arrays of an archive by name; any exception: the file is not such an archive."""
    length = file.seek(0, 2)
    with ZipFile(file) as archive:
        infos = archive.infolist()
        names = [info.filename.removesuffix(".npy") for info in infos]
        if len(set(names)) != len(names):
            raise ValueError("a member occurs more than once")
        for info in infos:
            if info.compress_type != ZIP_STORED:
                raise ValueError(f"the member {shown(info.filename)} is compressed")
        # compared first: a damaged archive may announce any size
        announced = sum(info.file_size for info in infos)
        if announced > length:
            raise ValueError(f"its members are {announced} bytes long together, and the file {length}")
        arrays = {}
        for name, info in zip(names, infos, strict=True):
            with archive.open(info) as member:
                arrays[name] = _read_array(member, info.file_size)
    return arrays


def _read_array(member: IO[bytes], length: int) -> AnyArray:
    """Read an array in NumPy's format, whose length must be that of its header."""
    version = npy.read_magic(member)
    # versions 2 and 3 differ in the characters that names of fields may have, which is nothing to their sizes
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(member)
    if dtype.hasobject:
        raise ValueError("an array holds Python objects")
    left = length - member.tell()
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != left:
        raise ValueError(f"an array of shape {shown(shape)} and type {shown(str(dtype))} has {left} bytes")
    member.seek(0)
    array: AnyArray = npy.read_array(member, allow_pickle=False)
    return array


def _digest(arrays: Mapping[str, AnyArray], text: bytes) -> Bytes:
    """SHA-256 of a text and of arrays with their names, types and shapes."""
    sha = hashlib.sha256(text)
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(f"{name} {array.dtype.str} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return np.frombuffer(sha.digest(), np.uint8)


# Nested states as leaves and a JSON text of the rest ------------------------------------------------------------------


def split(state: object, kinds: Mapping[str, type]) -> tuple[dict[str, Any], str]:
    """Split nested dicts, lists and tuples into numbered leaves of some types, and a text of the rest."""
    # `kinds` are these types by their names in the text, not "dict" or "tuple"; an integer with more digits than `join`
    # takes is a ValueError, a leaf of another type a TypeError
    leaves: dict[str, Any] = {}

    def encode(value: object) -> object:
        for kind, of_type in kinds.items():
            if isinstance(value, of_type):
                key = str(len(leaves))
                leaves[key] = value
                return {kind: key}
        match value:
            case np.generic():
                return encode(value.item())
            case dict():
                return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
            case tuple():
                return {"tuple": [encode(v) for v in value]}
            case list():
                return [encode(v) for v in value]
            case int() if abs(value) >= 10**MOST_DIGITS:
                raise ValueError(f"cannot pack an integer of more than {MOST_DIGITS} digits into a checkpoint")
            case None | bool() | int() | float() | str():
                return value
        raise TypeError(f"cannot pack a {type(value).__name__} into a checkpoint")

    return leaves, json.dumps(encode(state))


def join(text: str, leaves: Mapping[str, Callable[[str], object]]) -> Any:
    """Undo `split`; ValueError, on one line, if it did not write this text, or a leaf is missing."""

    # `leaves` has for each kind a function that returns the leaf of a number, or raises KeyError
    def decode(value: object) -> Any:
        if isinstance(value, list):
            return [decode(one) for one in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise ValueError(f"{shown(value)} is neither a value nor a place of one")
        ((kind, held),) = value.items()
        match kind, held:
            case "dict", list() if all(isinstance(pair, list) and len(pair) == 2 for pair in held):
                return _dict([(decode(key), decode(one)) for key, one in held])
            case "tuple", list():
                return tuple(decode(one) for one in held)
            case str(), str() if kind in leaves:
                try:
                    return leaves[kind](held)
                except KeyError as error:
                    raise ValueError(f"the {kind} {shown(held)} is missing") from error
        raise ValueError(f"{shown(value)} is no value of a state")

    try:
        return decode(parse_json(text, most_depth=MOST_DEPTH, most_digits=MOST_DIGITS, surrogates=True))
    except RecursionError as error:
        raise ValueError("the text is nested too deep") from error


def _dict(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        made = dict(items)
    except TypeError as error:
        raise ValueError(f"a key is a list, a dict or an array ({error})") from error
    if len(made) != len(items):
        raise ValueError("a key occurs more than once in a dict")
    return made
