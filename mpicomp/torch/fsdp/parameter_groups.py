"""Parameter groups of FSDP2: names, shards, and the layout of the gradients that a reduce-scatter delivers.

`fully_shard` makes one group of each module's parameters. A parameter is cut along one dimension into a shard for each
rank. The reduce-scatter of a group delivers this rank's shards of the gradients one after the other, each in a slot as
long as the longest shard.

PyTorch has no public access to these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from mpicomp.torch.parameters import NamedParameter, require_dense_floats, require_own_gradients

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of activation checkpoints, and of torch.compile
_CHANGED = "its parameters were frozen, unfrozen or converted since: call hook.remove(), then fsdp_hook again"
_HALVED = (torch.float32, torch.bfloat16)  # types whose gradients FSDP divides before the hook


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter that FSDP shards, and its shard on this rank."""

    name: str
    shape: torch.Size  # of the whole parameter
    dim: int  # along which it is cut
    local_shape: torch.Size
    slot: int  # elements in the output of the reduce-scatter
    fsdp_param: FSDPParam

    @property
    def shard(self) -> Tensor:
        """Shard of this rank, in the optimizer's precision."""
        local: Tensor = self.fsdp_param._sharded_param_data[: self.local_shape.numel()]
        return local


class ParameterGroup:
    """The parameters of one FSDP module that are reduced together, those that require a gradient.

    Attributes
    ----------
    name, title : str
        The module's name; empty for the model itself. In messages its title stands for it.
    n : int
        Elements of the reduce-scatter's output on this rank.
    members : list of ShardedParameter
        In the order of the reduce-scatter's output. None if the module is frozen.
    dtype : torch.dtype
        Type in which gradients are reduced.
    """

    def __init__(self, name: str, module: FSDPModule, group: FSDPParamGroup, prefixes: dict[nn.Module, str]) -> None:
        self.name, self.module, self._group = name, module, group
        self.title = f"module {name!r}" if name else "the model itself"
        self._trained = _trained(group)
        self.members = [_member(one, prefixes) for one in self._trained]
        for member in self.members:
            require_dense_floats(member.name, member.shard, "leave its module out of fully_shard")
            require_own_gradients(member.name, member.fsdp_param.sharded_param, "")
        self.n = sum(member.slot for member in self.members)
        policy, first = group.mp_policy, group.fsdp_params[0].sharded_param.dtype
        self.dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or first

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that hold the shards, in the order of shards."""
        mesh: Any = self._group.mesh_info
        return tuple(dist.get_process_group_ranks(mesh.shard_process_group))

    @property
    def device(self) -> torch.device:
        """Device of the shards."""
        return self.members[0].fsdp_param.device

    @property
    def averages_replicas(self) -> bool:
        """Flag: FSDP averages over a second dimension of the mesh before it calls the hook."""
        return self._group.mesh_info.replicate_mesh_dim is not None

    @property
    def has_hook(self) -> bool:
        """Flag: a hook is set."""
        return self._group._all_reduce_hook is not None

    @property
    def averages_now(self) -> bool:
        """Flag: this backward's gradients are averaged over the nodes, see `FSDPModule.set_requires_all_reduce`."""
        return bool(self._group.all_reduce_grads)

    @cached_property
    def placeholders(self) -> list[NamedParameter]:
        """Names of the members, with tensors of their shards' shapes and devices whose elements share their memory."""
        pairs = [(one, torch.empty((), dtype=self.dtype, device=one.fsdp_param.device)) for one in self.members]
        return [NamedParameter(one.name, empty.expand(one.local_shape)) for one, empty in pairs]

    def set_hook(self, hook: Callable[[Tensor], None] | None) -> None:
        """Set the hook, or remove it."""
        self._group._all_reduce_hook = hook

    def set_collectives(self, all_gather: AllGather | None, reduce_scatter: ReduceScatter | None) -> None:
        """Set the module's custom collectives; None: FSDP's own ones."""
        self._group._all_gather_comm = all_gather or DefaultAllGather()
        self._group._reduce_scatter_comm = reduce_scatter or DefaultReduceScatter()

    def require_members(self) -> None:
        """Raise ValueError unless the members alone are trained, or the module is frozen."""
        trained = _trained(self._group)
        if trained and trained != self._trained:
            had = len(self.members)
            raise ValueError(f"{self.title} has {len(trained)} parameters to train, and had {had}; {_CHANGED}")

    def shards_of(self, output: Tensor) -> list[Tensor]:
        """Return each member's part of the reduce-scatter's output, in the shape of its shard; no copy.

        Raises
        ------
        ValueError
            The output is not one of these members' gradients.
        """
        if output.numel() != self.n or output.dtype != self.dtype:
            raise ValueError(
                f"FSDP brought {output.numel()} gradients of {output.dtype} of {self.title} where {self.n} of "
                f"{self.dtype} were due; {_CHANGED}"
            )
        starts = accumulate((member.slot for member in self.members), initial=0)
        pairs = zip(starts, self.members, strict=False)
        return [output[at : at + one.local_shape.numel()].view(one.local_shape) for at, one in pairs]

    def may_end_later(self, output: Tensor) -> bool:
        """Return True if the output becomes the parameters' gradient as it is, and may be written after the hook.

        FSDP converts, divides, copies or adds up other outputs right behind the hook, or its users read them.
        """
        if output.dtype not in _HALVED or self._group.force_sum_reduction_for_comms:
            return False
        return all(
            one.orig_dtype == output.dtype
            and not one.offload_to_cpu
            and one.sharded_param.grad is None
            and not getattr(one.sharded_param, "_post_accumulate_grad_hooks", None)
            for one in (member.fsdp_param for member in self.members)
        )


def parameter_groups(model: object) -> list[ParameterGroup]:
    """Return the groups of all FSDP modules of a model, in the model's order, those that are frozen at the end.

    Raises
    ------
    TypeError
        The model is no module.
    ValueError
        No module of the model is sharded and has parameters to train, or a group cannot be reduced.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}; pass the module that fully_shard was called on")
    prefixes = {module: name for name, module in model.named_modules()}
    groups = [group for name, module in model.named_modules() for group in _groups_of(name, module, prefixes)]
    trained = [group for group in groups if group.members]
    if not trained:
        raise ValueError(
            f"no module of the {type(model).__name__} is sharded and has parameters to train; call "
            "torch.distributed.fsdp.fully_shard on it first"
        )
    first = trained[0]
    for group in trained:
        if group.ranks != first.ranks:
            raise ValueError(
                f"{group.title} is sharded over ranks {list(group.ranks)}, and {first.title} over "
                f"{list(first.ranks)}; give fully_shard the same mesh for all modules"
            )
    name, times = Counter(member.name for group in trained for member in group.members).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{times} sharded parameters are called {name!r}; give their modules different names")
    return [*trained, *(group for group in groups if not group.members)]


def require_whole_model(groups: Sequence[ParameterGroup]) -> None:
    """Raise ValueError if FSDP trains these groups together with one that has no hook; unknown before a forward."""
    own = {group._group for group in groups}
    contexts = dict.fromkeys(group.module._get_fsdp_state()._state_ctx for group in groups)
    for group in (one for context in contexts for state in context.all_states for one in state._fsdp_param_groups):
        if group not in own and group._all_reduce_hook is None:
            name = f"module {group._module_fqn!r}" if group._module_fqn else "its outermost module"
            raise ValueError(
                f"the hook is for a part of the model: {name} has none, so that its gradients would not be averaged "
                "between nodes; pass the whole model to fsdp_hook, with its frozen modules"
            )


def _groups_of(name: str, module: nn.Module, prefixes: dict[nn.Module, str]) -> Iterator[ParameterGroup]:
    if not isinstance(module, FSDPModule):
        return
    groups = module._get_fsdp_state()._fsdp_param_groups
    for group in groups:
        # modules that fully_shard was given as a list share their group
        if _trained(group) and len(groups) > 1:
            raise ValueError(
                f"the parameters of module {name!r} are sharded over several meshes, by shard_placement_fn, and "
                "PyTorch sets no hook there; shard them over one mesh"
            )
        if group.modules[0] is module:
            if _trained(group) and group.mesh_info.shard_mesh_dim is None:
                raise ValueError(f"the parameters of module {name!r} are replicated, not sharded; use ddp_hook")
            yield ParameterGroup(_unwrapped(name), module, group, prefixes)


def _trained(group: FSDPParamGroup) -> list[FSDPParam]:
    return [one for one in group.fsdp_params if one.sharded_param.requires_grad]


def _member(one: FSDPParam, prefixes: dict[nn.Module, str]) -> ShardedParameter:
    info = one._module_info
    name = _unwrapped(f"{prefixes[info.module]}.{info.param_name}".removeprefix("."))
    if one.is_dtensor:
        raise ValueError(
            f"parameter {name!r} was a DTensor before fully_shard, as in tensor parallelism, which is not supported; "
            "shard plain parameters"
        )
    slot = one.padded_sharded_param_size.numel()
    return ShardedParameter(name, one._orig_size, one.fsdp_placement.dim, one.sharded_size, slot, one)


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
