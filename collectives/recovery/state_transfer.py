"""Transfer of states from members to newcomers, in messages of a few megabytes.

`pack` makes frames of a state: one of its pickle, and one for the memory of each long array, which is not copied. All
ranks of the pool know the lengths of all frames, and meet behind each round of pieces. So a death ends the transfer on
all of them, and a rank that waits for others counts the time of one piece towards the timeout, not that of the state.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.annotations import Bytes, Tensor, Testable
from collectives.arrays.tensor_bytes import tensor_bytes
from collectives.consistency.descriptions import gather_objects
from collectives.progress.polling import keep_alive, wait

# A piece takes milliseconds: a rank that waits longer than YIELD_S of `polling` sleeps between two polls. With 64 MiB
# a state of 500 MB took no less time.
PIECE_BYTES = 8 << 20
LONG_BYTES = 1 << 20  # arrays from this length on have a frame of their own
_PIECE = 3  # tag of messages in the pool


def pack(state: object) -> list[Bytes]:
    """Return the frames of a state, which share the memory of its long arrays and tensors of the host."""
    buffers: list[Bytes] = []

    def is_short(buffer: pickle.PickleBuffer) -> bool:
        memory = np.frombuffer(buffer.raw(), np.uint8)
        if memory.nbytes < LONG_BYTES:
            return True
        buffers.append(memory)
        return False

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=is_short)
    if (torch := sys.modules.get("torch")) is not None:  # whose own pickles copy the memory of a tensor several times
        table: Any = ChainMap({torch.Tensor: _reduce_tensor}, copyreg.dispatch_table)
        pickler.dispatch_table = table
    pickler.dump(state)
    return [np.frombuffer(stream.getbuffer(), np.uint8), *buffers]


def unpack(frames: Sequence[Bytes]) -> Any:
    """Return the state of `pack`; its long arrays are the memory of the frames."""
    return pickle.loads(frames[0].data, buffers=frames[1:])


def _reduce_tensor(tensor: Tensor) -> Any:
    """Return the parts of a tensor's pickle: its memory, if that is plain and of the host."""
    torch = sys.modules["torch"]
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_contiguous()
    is_plain = is_plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad)
    if not is_plain or tensor.numel() * tensor.element_size() < LONG_BYTES:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return _tensor_of, (pickle.PickleBuffer(tensor_bytes(tensor).numpy()), tensor.dtype, tuple(tensor.shape))


def _tensor_of(memory: Bytes, dtype: Any, shape: tuple[int, ...]) -> Tensor:
    torch = sys.modules["torch"]  # loaded with the dtype
    return torch.from_numpy(memory).view(dtype).view(shape)


def transfer(
    pool: MPI.Comm,
    senders: Sequence[int],
    receivers: Sequence[int],
    frames: Sequence[Bytes],
    timeout_s: float,
    arrival_timeout_s: float,
) -> list[list[Bytes]]:
    """Send the frames of some ranks of the pool to others; collective in the pool.

    Parameters
    ----------
    pool : MPI.Comm
    senders, receivers : sequence of int
        Ranks of the pool.
    frames : sequence of arrays
        Of a sender; they must not change meanwhile.
    timeout_s, arrival_timeout_s : float
        Seconds that a piece may take, and those in which the senders make their frames.

    Returns
    -------
    list of lists of arrays
        The frames of each sender, in the order of `senders`; on receivers, else empty.

    Raises
    ------
    CollectiveTimeout, DamagedMessage, PeerFailure
        All ranks then have to leave the pool: messages may be in flight.
    """

    def waiting() -> str:
        return f"rank {pool.rank} of {pool.size}: not all ranks transfer a state (look for one that stopped)"

    lengths = gather_objects(pool, [frame.nbytes for frame in frames], arrival_timeout_s)
    arriving = {sender: [np.empty(length, np.uint8) for length in lengths[sender]] for sender in senders}
    if pool.rank not in receivers:
        arriving = {pool.rank: list(frames)} if pool.rank in senders else {}
    pieces = {sender: _pieces(lengths[sender]) for sender in senders}
    for number in range(max(map(len, pieces.values()))):
        requests: list[Testable] = []
        try:
            for sender, parts in arriving.items():
                if number < len(pieces[sender]):
                    frame, span = pieces[sender][number]
                    part = parts[frame][span]
                    piece = [part, part.nbytes, MPI.BYTE]
                    if pool.rank == sender:
                        requests += [pool.Isend(piece, receiver, _PIECE) for receiver in receivers]
                    else:
                        requests.append(pool.Irecv(piece, sender, _PIECE))
            requests.append(pool.Ibarrier())
            for request in requests:
                wait(request, timeout_s, waiting)
        except BaseException:
            keep_alive(requests)  # MPI may still read or write the pieces
            raise
    return list(arriving.values()) if pool.rank in receivers else []


def _pieces(lengths: Sequence[int]) -> list[tuple[int, slice]]:
    """Return the frame and the part of it of each piece."""
    return [
        (frame, slice(start, min(start + PIECE_BYTES, length)))
        for frame, length in enumerate(lengths)
        for start in range(0, length, PIECE_BYTES)
    ]
