"""States of the vectors of shards, as ``torch.distributed.checkpoint`` saves and loads them.

A state is one flat dict. Entries that belong to elements, such as a residual, become a distributed tensor for each
parameter, of shape [nodes, *shape of the parameter]: a row for each node, of which each rank has its shard. So another
number of shards is a matter of reading other parts, and another number of nodes of reading all rows.

    residual/layer.weight               DTensor [nodes, *shape]
    shard 0/layer.weight/magnitudes     numbers that the nodes share, of the vector that begins with this parameter
    shard 0/node 1/layer.weight/owned   range of elements whose error this node's rank keeps
    description                         nodes, shards, and the members and algorithms of all vectors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from collectives.json_file import fields, parse_json
from collectives.quoting import one_line, shown
from mpicomp.feedback.base import BY_ELEMENT
from mpicomp.state.redistribute import redistribute
from mpicomp.torch.fsdp.parameter_groups import ShardedParameter
from mpicomp.torch.state.schema import State, require_wide

if TYPE_CHECKING:
    from mpicomp.torch.fsdp.group_reduction import ShardVector

_DESCRIPTION = "description"
_ABOUT = ("method", "n")  # entries that the description and the shapes stand for


class ShardStates:
    """States of this rank's vectors.

    Parameters
    ----------
    vectors : sequence of ShardVector
        Those with elements on this rank.
    layout : list of list of int
        Global ranks, a row for each node, in the order of shards.
    node, shard : int
        This rank's place in the layout.
    described : list of list of str
        Members and algorithms of all vectors, also those without elements here, equal on all ranks.
    """

    def __init__(
        self, vectors: Sequence[ShardVector], layout: list[list[int]], node: int, shard: int, described: list[list[str]]
    ) -> None:
        self.vectors, self._node, self._shard = tuple(vectors), node, shard
        self._nodes, self._shards = len(layout), len(layout[0])
        # without process groups: only the places of shards are read from it
        self._mesh = DeviceMesh("cpu", torch.from_numpy(np.array(layout)), _init_backend=False)
        self._described = described

    # Whole states ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return a copy of the state, of which this rank has its shards."""
        description = json.dumps({"nodes": self._nodes, "shards": self._shards, "vectors": self._described})
        state: State = {_DESCRIPTION: description}
        for vector in self.vectors:
            aggregator = vector.reducer.aggregator
            own, kinds = aggregator.state_dict(), aggregator.state_kinds
            for entry, value in own.items():
                if entry in _ABOUT:
                    continue
                if self._is_by_element(vector, kinds[entry], value):
                    parts = vector.reducer.bucket.views(torch.from_numpy(value))
                    for member, part in zip(vector.members, parts, strict=True):
                        state[f"{entry}/{member.name}"] = self._distributed(member, part[None].clone(), self._nodes)
                else:
                    state[self._key(vector, entry, kinds[entry])] = torch.from_numpy(np.array(value))
        return state

    def checked(self, state: Mapping[str, Any]) -> list[State]:
        """Return the aggregators' states in a state of equally many nodes and shards; ValueError if it does not fit."""
        if not isinstance(state, Mapping) or not isinstance(state.get(_DESCRIPTION), str):
            raise ValueError(f"the state is {shown(state)}; load a result of state_dict")
        saved = self._require_same_model(state[_DESCRIPTION])
        if (saved["nodes"], saved["shards"]) != (self._nodes, self._shards):
            raise ValueError(
                f"the state is of {saved['nodes']} nodes of {saved['shards']} ranks, and here are {self._nodes} of "
                f"{self._shards}; load it by load_checkpoint"
            )
        return [self._gathered(vector, state) for vector in self.vectors]

    def check(self, states: list[State]) -> list[State]:
        """Return the states; ValueError unless the aggregators can load them."""
        for vector, state in zip(self.vectors, states, strict=True):
            vector.reducer.aggregator.check_state_dict(state)
        return states

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def saved_keys(self, checkpoint_id: Any, key: str) -> dict[str, Any]:
        """Return the entries of a checkpoint that has a state of a hook; ValueError otherwise."""
        try:
            saved_keys = FileSystemReader(Path(checkpoint_id)).read_metadata().state_dict_metadata
        except Exception as error:
            raise ValueError(f"{checkpoint_id} is not a checkpoint that can be read ({one_line(error)})") from error
        if f"{key}.{_DESCRIPTION}" not in saved_keys:
            raise ValueError(f"{checkpoint_id} has no state of a hook under {key!r}; pass the key that it was saved by")
        return saved_keys

    def read(self, checkpoint_id: Any, key: str, saved_keys: dict[str, Any]) -> list[State]:
        """Return the aggregators' states from a checkpoint, cut and averaged for these nodes and shards; collective."""
        description = self._read(checkpoint_id, key, {_DESCRIPTION: ""})[_DESCRIPTION]
        saved = self._require_same_model(description)
        if (saved["nodes"], saved["shards"]) == (self._nodes, self._shards):
            return self.checked(self._read(checkpoint_id, key, self.state_dict()))
        prefix = f"{key}."
        template: State = {}
        for name, stored in saved_keys.items():
            own = name.removeprefix(prefix)
            if isinstance(stored, TensorStorageMetadata) and name.startswith(f"{prefix}shard "):
                template[own] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
        for vector in self.vectors:
            for entry, value in vector.reducer.aggregator.state_dict().items():
                for member in vector.members:
                    if f"{prefix}{entry}/{member.name}" in saved_keys:
                        zeros = np.zeros((saved["nodes"], *member.local_shape), np.asarray(value).dtype)
                        part = torch.from_numpy(zeros)
                        template[f"{entry}/{member.name}"] = self._distributed(member, part, saved["nodes"])
        state = self._read(checkpoint_id, key, template)
        return [self._redistributed(vector, state, saved["nodes"], saved["shards"]) for vector in self.vectors]

    def _redistributed(self, vector: ShardVector, state: State, nodes: int, shards: int) -> State:
        """Return a vector's state from all `nodes` rows of a state of another number of nodes or shards."""
        kinds, fresh = vector.reducer.aggregator.state_kinds, vector.reducer.aggregator.state_dict()
        shared = {
            entry: self._carried_over(vector, entry, value, state, shards)
            for entry, value in fresh.items()
            if kinds[entry] == "shared" and entry not in _ABOUT
        }
        rows = []
        for node in range(nodes):
            row = {entry: fresh[entry] for entry in _ABOUT} | shared
            for entry, value in fresh.items():
                if kinds[entry] in BY_ELEMENT:
                    row[entry] = self._joined(vector, entry, value, state, node)
            rows.append(row)
        return redistribute(rows, self._nodes, kinds)[self._node]

    def _carried_over(self, vector: ShardVector, entry: str, fresh: Any, state: State, shards: int) -> Any:
        """Return an entry that nodes share, of `shards` shards that there were: from the one that held the first row.

        An array with a number for each tensor is taken over tensor by tensor. Other arrays that do not fit, of which
        methods keep those that save work, stay as they are in a new aggregator.
        """
        first = vector.on_all_shards[0].name
        places = [self._shard * _rows(member, self._shards) // _rows(member, shards) for member in vector.members]
        found = [state.get(f"shard {place}/{first}/{entry}") for place in places]
        known = [value for value in found if value is not None]
        if not known:
            return fresh
        if not isinstance(fresh, np.ndarray):
            return _like(fresh, known[0])
        if fresh.shape == (len(places),):
            taken = fresh.copy()
            for i, (member, place, values) in enumerate(zip(vector.members, places, found, strict=True)):
                names = [one.name for one in vector.on_all_shards if place * _rows(one, shards) < one.shape[one.dim]]
                if values is not None and member.name in names and values.shape == (len(names),):
                    taken[i] = values[names.index(member.name)]
            return taken
        return _like(fresh, known[0]) if tuple(known[0].shape) == fresh.shape else fresh

    # Parts of a state ------------------------------------------------------------------------------------------------

    def _gathered(self, vector: ShardVector, state: Mapping[str, Any]) -> State:
        """Return a vector's state from one of equally many nodes and shards."""
        kinds, fresh = vector.reducer.aggregator.state_kinds, vector.reducer.aggregator.state_dict()
        own: State = {entry: fresh[entry] for entry in _ABOUT}
        for entry, value in fresh.items():
            if entry in _ABOUT:
                continue
            if self._is_by_element(vector, kinds[entry], value):
                own[entry] = self._joined(vector, entry, value, state, 0)
            else:
                own[entry] = _like(value, _tensor(state, self._key(vector, entry, kinds[entry])))
        return own

    def _joined(self, vector: ShardVector, entry: str, like: Any, state: Mapping[str, Any], row: int) -> Any:
        """Return a vector of the elements of all members in a row of a state; the padding between them is zero."""
        if not self._is_by_element(vector, "mean", like):
            return like
        joined = np.zeros_like(like)
        views = vector.reducer.bucket.views(torch.from_numpy(joined))
        for member, view in zip(vector.members, views, strict=True):
            local = _tensor(state, f"{entry}/{member.name}")
            if local.shape[1:] != view.shape:
                raise ValueError(f"the state's {entry}/{member.name} has shards of shape {list(local.shape[1:])}")
            view.copy_(local[row])
        return joined

    def _is_by_element(self, vector: ShardVector, kind: str, value: Any) -> bool:
        return kind in BY_ELEMENT and np.shape(value) == (vector.reducer.bucket.n,)

    def _key(self, vector: ShardVector, entry: str, kind: str) -> str:
        node = "" if kind == "shared" else f"node {self._node}/"
        return f"shard {self._shard}/{node}{vector.on_all_shards[0].name}/{entry}"

    def _distributed(self, member: ShardedParameter, part: Tensor, nodes: int) -> DTensor:
        """Return the shard of a parameter's entry as part of the whole, of which this rank has one row, or all rows."""
        shape = torch.Size((nodes, *member.shape))
        rows = Shard(0) if part.shape[0] == 1 and nodes == self._nodes else Replicate()
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        placements = (rows, Shard(1 + member.dim))
        return DTensor.from_local(part, self._mesh, placements, run_check=False, shape=shape, stride=stride)

    def _require_same_model(self, description: str) -> dict[str, Any]:
        """Return the content of a description: nodes, shards and vectors."""
        try:
            found = fields(parse_json(description), nodes=int, shards=int, vectors=list)
            if min(found["nodes"], found["shards"]) < 1:
                raise ValueError("it is of no ranks")
        except ValueError as error:
            raise ValueError("the state's description is damaged; load an earlier one") from error
        vectors = found["vectors"]
        if vectors != self._described:
            pairs = [*zip(vectors, self._described, strict=False), (f"{len(vectors)}", f"{len(self._described)}")]
            one, other = next((a, b) for a, b in pairs if a != b)
            raise ValueError(
                f"the state is of other vectors: it has {shown(one)} where this hook has {shown(other)}; shard the "
                "same model in the same way, and pass the same algorithms"
            )
        return found

    def _read(self, checkpoint_id: Any, key: str, template: State) -> State:
        state = {key: template}
        try:
            load(state, checkpoint_id=checkpoint_id)
        except CheckpointException as error:
            raise ValueError(f"{checkpoint_id} cannot be read ({one_line(error)})") from None
        return state[key]


def _rows(member: ShardedParameter, shards: int) -> int:
    """Return the rows of a parameter's shards, of which later ones may have fewer."""
    return max(1, -(-member.shape[member.dim] // shards))


def _tensor(state: Mapping[str, Any], key: str) -> Tensor:
    value = state.get(key)
    if not isinstance(value, Tensor):
        raise ValueError(f"the state has no tensor {key!r}; load a result of state_dict of the same model")
    require_wide(key, value)
    return value.to_local() if isinstance(value, DTensor) else value


def _like(value: Any, tensor: Tensor) -> Any:
    """Return a tensor as an array, or number, of the type of `value`."""
    if isinstance(value, np.ndarray):
        return tensor.detach().cpu().numpy().astype(value.dtype)
    return type(value)(tensor.item())
