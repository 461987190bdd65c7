"""Files: states, checkpoints, records, traces, models of networks and stores."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import mpicomp
from apps.fuzz.scratch import folder, scratch_file
from apps.fuzz.target import Target
from apps.records import read_record
from apps.train.checkpoint_files import MANIFEST, MODEL, CheckpointFiles
from apps.train.idx import read_idx
from apps.train.run_records import epochs, read_run, settings
from collectives.cost.link import LinkModel
from mpicomp.algorithms import ALGORITHMS
from mpicomp.cli import analyze, flight_files, trace
from mpicomp.pipeline import FileMessageStore
from mpicomp.state.state_file import _digest, join, load_state, save_state, split
from mpicomp.torch.state import rank_files
from mpicomp.torch.state.redistribution import redistribute_states

_SPLIT = b"\n---\n"  # between the files of an input


# States ---------------------------------------------------------------------------------------------------------------


def _load_state(content: bytes) -> None:
    load_state(scratch_file("state.npz", content))


def _state_seeds() -> list[bytes]:
    found = []
    for state in (
        {"losses": (0.5, 0.25)},
        {"a": np.arange(5, dtype=np.float32), "b": {"c": [None, True, 1 << 60]}},
        {},
    ):
        path = folder() / "seed.npz"
        save_state(path, state)
        found.append(path.read_bytes())
    return found


def _load_sealed_state(content: bytes) -> None:
    """Read a state whose SHA-256 is right, and whose text is the input."""
    arrays: dict[str, Any] = {"0": np.arange(3, dtype=np.float32), "1": np.zeros((), np.int64)}
    file = BytesIO()
    np.savez(file, state=np.frombuffer(content, np.uint8), sha256=_digest(arrays, content), **arrays)
    load_state(scratch_file("state.npz", file.getvalue()))


_TEXTS = (
    b'{"dict": [["a", {"array": "0"}], [{"tuple": [1, 2]}, [null, true, NaN, "x"]]]}', b'{"dict": []}',
    b'{"dict": [["step", 3], ["n", {"array": "1"}]]}',
)  # fmt: skip


@cache
def _aggregators() -> list[Any]:
    comm = mpicomp.Communicator(timeout=5)
    return [mpicomp.algorithm(name).start(comm, 64) for name in ALGORITHMS]


def _load_aggregator_state(content: bytes) -> None:
    """Check the state that a text describes; arrays by number are those of a saved one."""
    number, text = content[:1] or b"\0", content[1:]
    aggregator = _aggregators()[number[0] % len(_aggregators())]
    leaves, _ = split(aggregator.state_dict(), {"array": np.ndarray})
    try:
        state = join(text.decode(errors="replace"), {"array": leaves.__getitem__})
    except ValueError:
        return
    aggregator.load_state_dict(state)


def _aggregator_seeds() -> list[bytes]:
    return [
        bytes([number]) + split(one.state_dict(), {"array": np.ndarray})[1].encode()
        for number, one in enumerate(_aggregators())
    ]


@cache
def _optimizer_state() -> Any:
    import mpicomp.torch

    def save(comm: Any) -> Any:
        model = torch.nn.Linear(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = mpicomp.torch.DistributedOptimizer(sgd, mpicomp.LocalTopK(rate=3), comm, model.named_parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    return mpicomp.run_local(1, save)[0]


def _redistribute(content: bytes) -> None:
    """Redistribute the rank's state that a text describes."""
    kinds = {"tensor": torch.Tensor, "array": np.ndarray}
    leaves, _ = split(_optimizer_state(), kinds)
    try:
        state = join(content.decode(errors="replace"), dict.fromkeys(kinds, leaves.__getitem__))
    except ValueError:
        return
    redistribute_states([state], 2)


def _optimizer_seeds() -> list[bytes]:
    return [split(_optimizer_state(), {"tensor": torch.Tensor, "array": np.ndarray})[1].encode()]


def _torch_seeds() -> list[bytes]:
    found = []
    for state in ({"save": "ab", "states": [{"a": torch.ones(3)}]}, [{"step": 1}]):
        file = BytesIO()
        torch.save(state, file)
        found.append(file.getvalue())
    return found


# Records of training ------------------------------------------------------------------------------------------------


def _read_run(content: bytes) -> None:
    found = read_run(scratch_file("run.jsonl", content))
    settings("run", found)
    epochs("run", found)


_RUN = (
    b'{"kind": "epoch", "epoch": 1, "accuracy": 0.5, "bytes_so_far_per_rank": 1, "seconds_so_far": 2.0, "algorithm": '
    b'"marsit", "algorithm_options": {}, "dataset": "digits", "model": "mlp", "ranks": 2, '
    b'"optimizer": "sgd", "lr": 0.1}\n'
)


def _read_checkpoint(content: bytes) -> None:
    """Read a manifest, and the files that it names."""
    manifest, _, model = content.partition(_SPLIT)
    inner = folder("checkpoint")
    (inner / MANIFEST).write_bytes(manifest)
    (inner / MODEL).write_bytes(model)
    (inner / "rank-00000.safetensors").write_bytes(model)
    files = CheckpointFiles(inner, "start again")
    files._tensors(MODEL)
    files.state(0)
    files.model()


def _checkpoint_seeds() -> list[bytes]:
    leaves, text = split({"step": 3, "m": torch.ones(3)}, {"tensor": torch.Tensor, "array": np.ndarray})
    model = safetensors.torch.save(leaves, {"state": text})
    manifest = {"ranks": 1, "step": 5, "header": {"options": {}}, "sha256": {MODEL: "0" * 64}}
    return [json.dumps(manifest).encode() + _SPLIT + model]


def _idx_seeds() -> list[bytes]:
    import gzip

    plain = bytes((0, 0, 8, 3)) + struct.pack(">III", 2, 2, 3) + bytes(range(12))
    return [b"\0" + plain, b"\1" + gzip.compress(plain)]


def _read_idx(content: bytes) -> None:
    read_idx(scratch_file("images.gz" if content[:1] == b"\1" else "images", content[1:]), 3)


# Records of jobs ------------------------------------------------------------------------------------------------------


def _analyze(content: bytes) -> None:
    """Analyze the files of two ranks."""
    inner = folder("flights")
    for rank, part in enumerate(content.partition(_SPLIT)[::2]):
        (inner / f"flight-{rank}.json").write_bytes(part)
    report = analyze.analyze(*flight_files.read(inner))
    analyze.text(report)
    json.dumps(asdict(report))


def _flight(rank: int, begun: int) -> bytes:
    call = {"communicator": 0, "call": 1, "text": 0, "step": 3, "begun": 1.0, "compared": 0, "ended": 0}
    return json.dumps(
        {
            "format": 1, "reason": "CollectiveTimeout", "rank": rank, "ranks": 3, "missing": [2],
            "clock": {"monotonic": 9.0, "wall": 1e9},
            "communicators": [{"key": "world", "begun": begun, "members": [0, 1, 2]}],
            "texts": ["allreduce of float32[4]", "barrier"], "calls": [call, {**call, "call": 2, "text": rank}],
            "threads": [{"name": "MainThread", "stack": ["/a/collectives/b.py:3 wait", "/train.py:7 main"]}],
        }
    ).encode()  # fmt: skip


def _read_traces(content: bytes) -> None:
    inner = folder("traces")
    for rank, part in enumerate(content.partition(_SPLIT)[::2]):
        (inner / f"rank-{rank}.json").write_bytes(part)
    found, _ = trace.read(inner)
    trace.remarks(found)
    for last in (0, 1):
        trace.table([trace.RankTrace.of(one, last) for one in found])


def _trace(rank: int) -> bytes:
    events = [
        {"ph": "X", "ts": 1.0, "dur": 9.5, "cat": "call", "tid": 1}, {"ph": "X", "ts": 2, "dur": 1, "cat": "encode"},
        {"ph": "b", "ts": 3, "id": "a", "cat": "send", "args": {"call": 1, "message": 0, "peer": 1 - rank}},
        {"ph": "e", "ts": 4, "id": "a", "cat": "send"}, {"ph": "b", "ts": 1, "id": "f", "cat": "flight"},
        {"ph": "e", "ts": 8, "id": "f", "cat": "flight"}, {"ph": "M", "name": "x"},
    ]  # fmt: skip
    about = {"rank": rank, "ranks": 2, "run": 5.0, "complete": True, "clock": [{"round_trip": 1e-6}], "link": "1gbit"}
    return json.dumps({"otherData": about, "traceEvents": events}).encode()


_NETWORK = b'{"latency_s": 1e-6, "bandwidth_bytes_s": 2e10, "overhead_s": 0.0, "group_size": 2, "uplink_bytes_s": null}'


def _reader(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    def run(content: bytes) -> None:
        read(scratch_file(name, content))

    return run


# Stores ---------------------------------------------------------------------------------------------------------------

_EXAMPLES, _WIDTH = 5, 4


def _open_store(path: Path) -> FileMessageStore:
    return FileMessageStore(path, _EXAMPLES, _WIDTH, fingerprint="run")


@cache
def _store() -> bytes:
    path = folder() / "seed.store"
    with _open_store(path) as store:
        store.write([0, 3], np.ones((2, _WIDTH), np.float32))
    return path.read_bytes()


def _read_store(content: bytes) -> None:
    """Open a store of which the input replaces a part: the place in two bytes, then bytes; read the rows it has."""
    whole, at = bytearray(_store()), int.from_bytes(content[:2].ljust(2, b"\0"), "little") % len(_store())
    part = content[2:]
    if at == 0xFFF:
        whole = bytearray(part)
    else:
        whole[at : at + len(part)] = part
    with _open_store(scratch_file("rows.store", bytes(whole))) as store:
        stamps = store.all_stamps()
        store.read(np.flatnonzero(stamps))
        store.state_dict()


def _store_seeds() -> list[bytes]:
    whole = _store()
    places = (0, 8, 20, 4080, 4088, 4096, 4104, 8192)
    return [struct.pack("<H", at) + whole[at : at + 48] for at in places] + [struct.pack("<H", 0xFFF) + whole[:100]]


TARGETS = [
    Target("state-files", "load_state", _state_seeds, _load_state),
    Target("state-texts", "load_state, of an intact archive", lambda: [*_TEXTS], _load_sealed_state),
    Target("aggregator-states", "Aggregator.load_state_dict", _aggregator_seeds, _load_aggregator_state),
    Target("optimizer-states", "redistribute_states", _optimizer_seeds, _redistribute),
    Target("rank-files", "rank_files._read", _torch_seeds, _reader("rank.pt", rank_files._read)),
    Target("train-checkpoints", "CheckpointFiles", _checkpoint_seeds, _read_checkpoint),
    Target("train-runs", "read_run, settings, epochs", lambda: [_RUN, _RUN * 2], _read_run),
    Target("records", "read_record", lambda: [b'{"settings": {}, "seconds": [1.5, NaN]}'],
           _reader("record.json", lambda path: read_record(path, settings=dict))),
    Target("images", "read_idx", _idx_seeds, _read_idx),
    Target("networks", "LinkModel.load", lambda: [_NETWORK], _reader("network.json", LinkModel.load)),
    Target("flight-files", "analyze", lambda: [_flight(0, 2) + _SPLIT + _flight(1, 1), _flight(0, 1)], _analyze),
    Target("trace-files", "trace.read, RankTrace.of, table", lambda: [_trace(0) + _SPLIT + _trace(1)], _read_traces),
    Target("stores", "FileMessageStore", _store_seeds, _read_store),
]  # fmt: skip
