"""Parameters laid out in flat vectors, each small enough to be a unit of communication.

A bucket holds whole tensors of one dtype, one device and one algorithm. For methods that treat tensors separately each
tensor starts at a multiple of 64 elements, so that no two tensors share a word of packed signs. The gap behind a tensor
is padding, zero on the way in and ignored on the way out. For other methods tensors lie end to end, as zeros would
count in their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from collectives.quoting import shown
from mpicomp.torch.parameters import NamedParameter

ALIGNMENT = 64
"""Elements: one 64-bit word of packed signs."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that share one flat vector."""

    index: int  # position among all buckets; distinguishes their random streams
    dtype: torch.dtype
    members: tuple[NamedParameter, ...]  # in vector order
    alignment: int = ALIGNMENT  # elements: members start at multiples of it

    @property
    def names(self) -> list[str]:
        """Names of the members."""
        return [member.name for member in self.members]

    def by_name(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the first ones of the members' tensors, which are in vector order, by name."""
        return dict(zip(self.names, tensors, strict=False))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements each member occupies, padding included."""
        return tuple(_padded(member.parameter.numel(), self.alignment) for member in self.members)

    @cached_property
    def n(self) -> int:
        """Elements of the flat vector."""
        return sum(self.lengths)

    @property
    def device(self) -> torch.device:
        """Device of the members, and of the flat vector."""
        return self.members[0].parameter.device

    def padding(self) -> Tensor:
        """Indices (int64, on the device) of the vector's padding elements."""
        places = torch.split(torch.arange(self.n, dtype=torch.int64, device="cpu"), list(self.lengths))
        padding = [own[m.parameter.numel() :] for m, own in zip(self.members, places, strict=True)]
        return torch.cat(padding).to(self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each member's part of `flat` (at least ``n`` elements), in the member's shape; no copy."""
        starts = accumulate(self.lengths, initial=0)
        tensors = [member.parameter for member in self.members]
        return [flat[at : at + one.numel()].view(one.shape) for at, one in zip(starts, tensors, strict=False)]

    def tensors(self, rows: Tensor, row: int) -> list[Tensor]:
        """Return each member's part of ``rows[row]``, of `rows` [r, at least ``n``], as a tensor that is not a view.

        PyTorch refuses ``detach_()`` of views, which loops call on gradients. On devices the tensors are views.
        """
        start = rows.storage_offset() + row * rows.stride(0)
        tensors = [rows.as_strided(shape, strides, start + at) for shape, strides, at in self._layout]
        return tensors if rows.device.type != "cpu" else [one.data for one in tensors]

    @cached_property
    def _layout(self) -> list[tuple[torch.Size, tuple[int, ...], int]]:
        """Shape, strides and start of each member in the vector."""
        shapes = [member.parameter.shape for member in self.members]
        strides = [torch.empty(shape, dtype=torch.uint8, device="meta").stride() for shape in shapes]
        return list(zip(shapes, strides, accumulate(self.lengths, initial=0), strict=False))


def group_parameters(
    parameters: Iterable[NamedParameter],
    bucket_mb: float,
    kind: Callable[[NamedParameter], Hashable] = lambda member: None,
) -> list[list[NamedParameter]]:
    """Group parameters of one dtype, one device and one `kind`, in order, into buckets of up to `bucket_mb` MiB.

    A tensor larger than that has a bucket to itself. Buckets are in the order in which their last members come. The
    grouping depends on the parameters' order, shapes, dtypes, devices and kinds alone, so ranks with the same model
    have the same buckets.
    """
    limit_bytes = bucket_mb * 2**20
    open_groups: dict[Hashable, list[NamedParameter]] = {}
    last_place: dict[int, int] = {}
    groups: list[list[NamedParameter]] = []
    for place, member in enumerate(parameters):
        key = member.parameter.dtype, member.parameter.device, kind(member)
        group = open_groups.get(key)
        if group is None or _nbytes([*group, member]) > limit_bytes:
            group = open_groups[key] = []
            groups.append(group)
        group.append(member)
        last_place[id(group)] = place
    return sorted(groups, key=lambda group: last_place[id(group)])


def make_bucket(index: int, members: Sequence[NamedParameter], alignment: int = ALIGNMENT) -> Bucket:
    """Return a bucket of these parameters, which have one dtype and one device."""
    return Bucket(index, members[0].parameter.dtype, tuple(members), alignment)


def members_by_name(
    names: Sequence[object], members: Sequence[NamedParameter], here: str, optional: Sequence[NamedParameter] = ()
) -> list[list[NamedParameter]]:
    """Return the members of the buckets that a state was saved with, by their names in the state.

    `members` must all be in the state, and `optional` ones may be. They are all that there are in `here`, their owner
    in words.

    Raises
    ------
    ValueError
        The buckets have other members than there are here; names them.
    """
    buckets = [one for one in names if isinstance(one, list) and one and all(isinstance(name, str) for name in one)]
    if len(buckets) < len(names):
        raise ValueError(f"the state's buckets are {shown(names)}, not lists of names; load an earlier one")
    by_name = {member.name: member for member in (*members, *optional)}
    saved = [name for bucket in buckets for name in bucket]
    foreign = set(saved) - set(by_name)
    wanted = set(by_name) if foreign else {member.name for member in members}
    problems = [
        f"{which} has {_some(more)}, which {other} lacks"
        for which, more, other in (("the state", foreign, here), (here, wanted - set(saved), "the state"))
        if more and saved
    ]
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}; build it from the same model with the same names, and before you load a state add "
            "or unfreeze the parameters that it has, and no others"
        )
    if len(saved) > len(set(saved)):
        raise ValueError("the state has a parameter twice; load an earlier one")
    return [[by_name[name] for name in bucket] for bucket in buckets]


def total_mb(members: Sequence[NamedParameter]) -> float:
    """MiB of all parameters."""
    return _nbytes(members) / 2**20


def _padded(numel: int, alignment: int = ALIGNMENT) -> int:
    return -(-numel // alignment) * alignment


def _nbytes(members: Sequence[NamedParameter]) -> int:
    return sum(_padded(m.parameter.numel()) * m.parameter.element_size() for m in members)


def _some(names: Collection[str]) -> str:
    names = sorted(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
