"""Messages of other ranks: marks, checksums, descriptions, questions, layouts and counts of a step."""

from __future__ import annotations

import pickle
import struct
from functools import cache
from io import BytesIO
from typing import Any, ClassVar, NoReturn
from unittest import mock

import numpy as np
import torch
from mpi4py import MPI

from apps.fuzz.target import Target
from collectives.annotations import Bytes, Testable, override
from collectives.checksum import digest
from collectives.checksums.checked_messages import compare_seal, seal_message
from collectives.communicator import objects
from collectives.communicator.inbox import read_header
from collectives.consistency.call_check import CLOSES, read_description
from collectives.consistency.descriptions import Description, difference
from collectives.consistency.missing_ranks import MissingRanks
from collectives.consistency.recursive_doubling import RecursiveDoubling
from collectives.errors import CollectiveMismatch, DamagedMessage
from mpicomp.codecs import RowQuantizer
from mpicomp.pipeline.activations import Deltas
from mpicomp.pipeline.agreement import PipelineError, read_fault
from mpicomp.pipeline.message_layout import MessageLayout, TensorField
from mpicomp.pipeline.tensors import unpack
from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.synchronizer.step_agreement import StepAgreement, StepIntent

_SEAL = struct.Struct("<QQ")
_LONGEST = 1 << 16
ERRORS = (ValueError, PipelineError)


class _Request(Testable):
    """Request that is over at once; a receive's memory gets the input."""

    def __init__(self, landing: Bytes | None = None, content: bytes = b"") -> None:
        self._landing, self._content = landing, content

    def Start(self) -> None:  # noqa: N802 - MPI's name
        if self._landing is not None:
            part = np.frombuffer(self._content, np.uint8)[: self._landing.size]
            self._landing[: part.size] = part

    @override
    def Test(self) -> bool:  # noqa: N802
        return True


class PeerOfInput:
    """Communicator of two ranks, whose other rank sends the input to each receive."""

    rank, size = 0, 2

    def __init__(self, content: bytes) -> None:
        self._content, self._unread = content, True

    def Send_init(self, buffer: Any, dest: int, tag: int) -> _Request:  # noqa: N802
        """Make a send that no rank receives."""
        return _Request()

    def Recv_init(self, buffer: Any, source: int, tag: int) -> _Request:  # noqa: N802
        """Make a receive of the input."""
        return _Request(buffer[0], self._content)

    def Isend(self, buffer: Any, dest: int, tag: int) -> _Request:  # noqa: N802
        """Send to no rank."""
        return _Request()

    def Iprobe(self, source: int, tag: int, status: Any) -> bool:  # noqa: N802
        """Return whether the input has not been received yet."""
        unread, self._unread = self._unread, False
        return unread

    def Recv(self, buffer: Any, source: int, tag: int) -> None:  # noqa: N802
        """Receive the input."""
        buffer[0][:] = np.frombuffer(self._content, np.uint8)


# Calls ----------------------------------------------------------------------------------------------------------------


def _compare_seal(content: bytes) -> None:
    seal = np.frombuffer(content[: _SEAL.size].ljust(_SEAL.size, b"\0"), np.uint64)
    compare_seal(np.frombuffer(content[_SEAL.size :], np.uint8), seal, "rank 0 of 2", 1)


def _seal_seeds() -> list[bytes]:
    seal, found = np.empty(2, np.uint64), []
    for n in (0, 1, 64):
        memory = np.arange(n, dtype=np.uint8)
        seal_message(memory, seal)
        found.append(seal.tobytes() + memory.tobytes())
    return found


def _exchange_marks(content: bytes) -> None:
    """Compare a call with the other rank's mark, and sum a vector on the way; the first byte chooses the length."""
    options, rest = content[:1] or b"\0", content[1:]
    n, has_checksums = options[0] >> 1, bool(options[0] & 1)
    exchange = RecursiveDoubling(PeerOfInput(rest), 8 * 128, has_checksums)  # type: ignore[arg-type]
    values = np.ones(n, np.float32) if n else None
    exchange.start(1234, values, None if values is None else np.empty_like(values))
    while not exchange.Test():
        pass


def _mark_seeds() -> list[bytes]:
    found = []
    for n in (0, 1, 100):
        body = struct.pack("<q", 1234).ljust(64, b"\0") + np.ones(n, np.float32).tobytes()
        found.append(bytes([n << 1]) + body)
        sealed = np.frombuffer(body, np.uint8).copy()
        sealed[8:24].view(np.uint64)[:] = 0, sealed.size
        sealed[8:16].view(np.uint64)[0] = digest(sealed)
        found.append(bytes([n << 1 | 1]) + sealed.tobytes())
    return found


_MINE = Description("allreduce of float32[4]", "allreduce", ["float32", ("4", "shape [4]"), "ring"]).wire


def _describe_difference(content: bytes) -> None:
    theirs, _ = read_description(content)
    difference({0: _MINE, 1: theirs})
    difference({0: theirs, 1: theirs[::-1]})


def _receive_question(content: bytes) -> None:
    class Status:
        source: ClassVar[int] = 1

        def Get_count(self, datatype: Any) -> int:  # noqa: N802
            return len(content)

    missing = MissingRanks(PeerOfInput(content), 1.0)  # type: ignore[arg-type]
    with mock.patch.object(MPI, "Status", Status):
        missing.receive_messages()
    missing.describe_late(3)
    missing.describe_gone(3)
    _ = missing.mismatch


class _SafeUnpickler(pickle.Unpickler):
    """Pickles may call any function: here they may not."""

    @override
    def find_class(self, module: str, name: str) -> NoReturn:
        raise AttributeError(f"{module}.{name} is not there")


def _unpickle(content: bytes) -> None:
    """Read an object of another rank. Without the opcodes whose numbers make CPython allocate gigabytes."""
    if b"r" in content or b"p" in content:
        return

    class Comm:
        here: ClassVar[str] = "rank 0 of 2"

        def reject(self, error: Exception, text: str) -> NoReturn:
            raise error

        def agree(self, mark: int, describe: object) -> None:
            pass

    with mock.patch.object(pickle, "loads", lambda data: _SafeUnpickler(BytesIO(data)).load()):
        objects._unpickle(Comm(), [np.frombuffer(content, np.uint8)], "allgather_object")  # type: ignore[arg-type]


# Pipelines ------------------------------------------------------------------------------------------------------------


def _read_layout(content: bytes) -> None:
    """Read an announcement in numbers (first byte 0) or in words, and split a message of that layout."""
    if content[:1] == b"\0":
        numbers = np.frombuffer(content[1:81].ljust(80, b"\0"), np.int64).tolist()
        layout = MessageLayout.from_numbers(numbers)
    else:
        layout = MessageLayout.from_text(content[1:])
    if sum(field.nbytes for field in layout.fields) > _LONGEST:
        return
    arrays = [
        np.zeros((2, *field.row_shape), np.float32) if field.coded else np.zeros((2, field.nbytes), np.uint8)
        for field in layout.fields
    ]
    unpack(layout, arrays)


def _layout_seeds() -> list[bytes]:
    one = MessageLayout('"*"', (TensorField("bfloat16", 2, (4, 8), True),))
    both = MessageLayout(
        '["dict", ["x", "*"], ["mask", ["tuple", "*", ["constant", 1.5]]]]',
        (TensorField("float32", 4, (3,), True), TensorField("bool", 1, (3,), False)),
    )
    numbers = np.zeros(10, np.int64)
    numbers[:4] = one.numbers() or ()
    return [b"\0" + numbers.tobytes(), *(b"\1" + layout.text().encode() for layout in (one, both))]


def _decode_activations(content: bytes) -> None:
    """Decode messages of examples that are seen for the first time (first byte even) or again."""
    coding = _coding()
    coding.roll_back()
    ids = np.arange(3) + 3 * (content[:1] > b"\x7f")
    payload = np.frombuffer(content[1:].ljust(coding.nbytes(ids, (4, 16)), b"\0"), np.uint8)
    coding.decode(payload[: coding.nbytes(ids, (4, 16))].copy(), ids, (4, 16))


@cache
def _coding() -> Any:
    from mpicomp.pipeline.coding import CodingPlace

    coding = Deltas(RowQuantizer(4), examples=6).start(CodingPlace(0))
    ids, shape = np.arange(3), (4, 16)
    coding.prepare(shape)
    coding.decode(np.zeros(coding.nbytes(ids, shape), np.uint8), ids, shape)
    coding.commit()
    return coding


# Steps ----------------------------------------------------------------------------------------------------------------


class _Ranks(PeerOfInput):
    here = "rank 0 of 2"

    def allgather_object(self, mine: Any) -> list[Any]:
        """Return this rank's object, and one in which the other rank differs."""
        text = self._content.decode(errors="replace")
        return [mine, {"refusal": text[:8].strip("\0"), "drops": len(text) % 2, "compared": {text: text}}]


def _conclude_step(content: bytes) -> None:
    """Conclude a step by sums of the ranks' numbers."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    comm: Any = _Ranks(content[40:])
    agreement = StepAgreement(optimizer, comm, [NamedParameter("weight", weight)], False)
    agreement._sums[:] = np.frombuffer(content[:40].ljust(40, b"\0"), np.int64)
    _ = agreement.is_settled
    agreement.conclude(StepIntent())


TARGETS = [
    Target("seals", "compare_seal", _seal_seeds, _compare_seal, (DamagedMessage,)),
    Target("call-marks", "RecursiveDoubling.Test", _mark_seeds, _exchange_marks, (DamagedMessage,)),
    Target("call-descriptions", "read_description, difference",
           lambda: [_MINE.encode(), _MINE.encode() + CLOSES, b"barrier"], _describe_difference, ()),
    Target("missing-ranks", "MissingRanks.receive_messages",
           lambda: [struct.pack("<qq", kind, 7) + b"text" * (kind % 2) for kind in range(5)], _receive_question, ()),
    Target("array-headers", "inbox.read_header",
           lambda: [(b"\0" * 8 + b"float32[4, 8]").ljust(104, b"\0"), b"\0" * 104],
           lambda content: read_header(np.frombuffer(content, np.uint8)), ()),
    Target("objects", "objects._unpickle",
           lambda: [pickle.dumps(one, 5) for one in ({"a": [1, 2.5]}, ("x", None), b"bytes", 1 << 70)],
           _unpickle, (TypeError,)),
    Target("pipeline-layouts", "MessageLayout.from_numbers, from_text, unpack", _layout_seeds, _read_layout,
           ERRORS),
    Target("pipeline-faults", "agreement.read_fault", lambda: [b"", b"disk full", "µ".encode()], read_fault, ()),
    Target("pipeline-activations", "Deltas.decode",
           lambda: [bytes([first]) * (1 + size) for first in (0, 200) for size in (10, 200, 800)],
           _decode_activations),
    Target("step-agreement", "StepAgreement.conclude",
           lambda: [np.array([0, 0, 0, 5, 2], np.int64).tobytes() + b"lr", np.zeros(5, np.int64).tobytes()],
           _conclude_step, (CollectiveMismatch, RuntimeError)),
]  # fmt: skip
