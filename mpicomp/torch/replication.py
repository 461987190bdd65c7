"""Equal models on all ranks: copies of parameters, means of buffers, and comparisons."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from collectives.arrays.tensor_bytes import tensor_bytes
from collectives.consistency.descriptions import Description, fingerprint
from collectives.errors import CollectiveMismatch
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import list_ranks
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.torch.devices import require_reachable
from mpicomp.torch.named_tensors import Exclude, checked_tensors, leave_out, tensors_of

_BROADCAST_BYTES = 25 * 2**20


@keep_uncompiled
def broadcast_parameters(
    module_or_state_dict: torch.nn.Module | Mapping[str, Tensor],
    comm: Communicator | None = None,
    root: int = 0,
    *,
    exclude: Exclude = (),
) -> None:
    """Copy one rank's parameters and buffers to all ranks; those of a module's buffers too that are not persistent.

    Parameters
    ----------
    module_or_state_dict : Module or dict of Tensor
        A module, or the tensors of one by name. Every tensor is **overwritten** on all ranks but `root`. Dense tensors
        of any dtype, on the CPU or a GPU, whichever on each rank; the bits are copied as they are.
    comm : Communicator, optional
        None makes one on all ranks of the job and closes it again.
    root : int
        Rank whose values all take.
    exclude : str or iterable of str
        Names of tensors that each rank keeps, or patterns of names: ``"*.experts.*"`` for experts that differ between
        ranks. The tensors left out may differ in name and shape.

    Raises
    ------
    TypeError, ValueError
        An entry of this rank's is not a tensor, has no shape yet or is on a device that cannot be reached, or `exclude`
        has a name that fits no tensor; the others then raise CollectiveMismatch.
    CollectiveMismatch
        The ranks' tensors differ in name, shape or dtype.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import broadcast_parameters
    >>> def make_model(comm):
    ...     model = torch.nn.Linear(2, 1, bias=False)
    ...     torch.nn.init.constant_(model.weight, comm.rank)
    ...     broadcast_parameters(model, comm)
    ...     return model.weight.tolist()
    >>> mpicomp.run_local(2, make_model)
    [[[0.0, 0.0]], [[0.0, 0.0]]]
    """
    call, usage = "broadcast_parameters", "broadcast_parameters(model, comm, root=0)"
    if comm is not None or isinstance(module_or_state_dict, Communicator):
        require_communicator(comm, call, usage, module_or_state_dict)
    if isinstance(module_or_state_dict, torch.nn.Module):
        module_or_state_dict = tensors_of(module_or_state_dict)
    with Communicator() if comm is None else nullcontext(comm) as used:
        broadcast_tensors(checked_tensors(module_or_state_dict, used, call, usage, exclude), used, root)


@keep_uncompiled
@torch.no_grad()
def average_buffers(module: torch.nn.Module, comm: Communicator, *, exclude: Exclude = ()) -> None:
    """Replace a module's floating-point and complex buffers by their mean over the ranks, densely.

    BatchNorm's running statistics are buffers, which each rank gathers from its own shard and no optimizer sees. Call
    this before evaluating or saving the model, and under Marsit with each full-precision round
    (``optimizer.synchronizations % full_precision_every == 1``), where the ranks' updates are averaged exactly too.
    Buffers of other dtypes, such as the number of batches seen, are not changed.

    Parameters
    ----------
    module : Module
        Its floating-point and complex buffers are **overwritten**.
    comm : Communicator
        Communicator of the ranks that train the module.
    exclude : str or iterable of str
        Names of buffers that each rank keeps, or patterns of names, as of :func:`broadcast_parameters`.

    Raises
    ------
    TypeError
        The arguments are no module and no communicator, or in another order.
    ValueError
        A buffer of this rank's has no shape yet or is on a device that cannot be reached, or `exclude` has a name that
        fits no buffer; the others then raise CollectiveMismatch.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import average_buffers
    >>> def prepare_evaluation(comm):
    ...     model = torch.nn.BatchNorm1d(2)
    ...     model.running_mean.fill_(comm.rank)
    ...     average_buffers(model, comm)
    ...     return model.running_mean.tolist()
    >>> mpicomp.run_local(2, prepare_evaluation)
    [[0.5, 0.5], [0.5, 0.5]]
    """
    require_communicator(comm, "average_buffers", "average_buffers(model, comm)", module)
    call = "average_buffers"
    buffers: list[Tensor] = []
    with comm.refusing(call, TypeError, ValueError):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{type(module).__name__} has no buffers: pass a module")
        for name, buffer in leave_out(dict(module.named_buffers()), exclude).items():
            if (buffer.is_floating_point() or buffer.is_complex()) and buffer.numel():
                require_reachable(f"buffer {name!r}", buffer)
                buffers.append(buffer)
    if not buffers:
        comm.agree(fingerprint(call), lambda: f"{call} of a module without buffers")
    if not buffers or comm.size == 1:
        return
    wide = {torch.float64, torch.complex128}
    dtype = torch.float64 if any(buffer.dtype in wide for buffer in buffers) else torch.float32
    # of complex numbers pairs of real ones, in one more dimension
    numbers = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in buffers]
    flat = torch.cat([one.reshape(-1).to(buffers[0].device, dtype) for one in numbers])
    parts = torch.split(comm.allreduce(flat, op="mean"), [one.numel() for one in numbers])
    for buffer, one, part in zip(buffers, numbers, parts, strict=True):
        mean = part.view(one.shape)
        # clone: a part may start at an odd number, and complex numbers begin at even ones
        buffer.copy_(torch.view_as_complex(mean.clone()) if buffer.is_complex() else mean)


def require_same_layout(named: Mapping[str, Tensor], comm: Communicator, on: str = "") -> None:
    """Raise CollectiveMismatch on every rank unless all have the same names, shapes and dtypes in the same order.

    The message names the first tensor that differs.

    on : where the tensors are, which must be the same words on all ranks.
    """
    layout = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()]
    # here, as the flight recorder keeps `describe`, which must not keep the model
    count, elements = f"{len(named)} tensors", f"of {sum(tensor.numel() for tensor in named.values())} elements"

    def describe() -> Description:
        each = [(one, f"{count} {elements}, of which number {i} is {one}") for i, one in enumerate(layout)]
        text = f"{count}{on} {elements}"
        return Description(
            text, "a comparison of tensors", ((on, text), *each, ("", f"{count} {elements}, and no other"))
        )

    comm.agree(fingerprint(f"{', '.join(layout)}{on}"), describe)


def require_same(
    module_or_state_dict: torch.nn.Module | Mapping[str, Tensor], comm: Communicator, *, exclude: Exclude = ()
) -> None:
    """Raise an error on every rank unless all ranks have the same model, to the bit. Collective.

    Parameters
    ----------
    module_or_state_dict : Module or dict of Tensor
        A module, of which the trained and frozen parameters are compared, or tensors by name. Tensors may lie on the
        CPU or a GPU, from which they are copied.
    comm : Communicator
        Communicator of the ranks that have the model.
    exclude : str or iterable of str
        Names of tensors that may differ, or patterns of names, as of :func:`broadcast_parameters`.

    Raises
    ------
    TypeError, ValueError
        As of :func:`broadcast_parameters`; the others then raise CollectiveMismatch.
    CollectiveMismatch
        The ranks' tensors differ in name, shape, dtype or value. Names the first one that differs, and the ranks.

    Examples
    --------
    >>> import torch
    >>> from mpicomp import Communicator
    >>> from mpicomp.torch import require_same
    >>> with Communicator() as comm:
    ...     require_same(torch.nn.Linear(2, 1), comm)
    """
    if isinstance(module_or_state_dict, torch.nn.Module):
        module_or_state_dict = dict(module_or_state_dict.named_parameters())
    usage = "require_same(model, comm)"
    named = checked_tensors(module_or_state_dict, comm, "require_same", usage, exclude, overwritten=False)
    require_same_layout(named, comm)
    require_same_values(named, comm)


def require_same_values(
    named: Mapping[str, Tensor], comm: Communicator, cure: str = "broadcast_parameters(model, comm) makes them equal"
) -> None:
    """Raise CollectiveMismatch on every rank unless all hold the same bits; names, shapes and dtypes are equal."""
    sums = [zlib.crc32(tensor_bytes(tensor).cpu().numpy().data) for tensor in named.values()]
    of_ranks = comm.allgather(np.array([fingerprint(str(sums))], np.int64))
    if len(set(np.ravel(of_ranks).tolist())) == 1:
        return
    tensors = comm.allgather(np.array(sums, np.int64)).reshape(-1, len(sums))
    differs = (tensors != tensors[0]).any(0)
    first = int(differs.argmax())
    ranks: dict[int, list[int]] = {}
    for rank, crc in enumerate(tensors[:, first].tolist()):
        ranks.setdefault(crc, []).append(rank)
    listed = ", ".join(f"checksum {crc:x} on {list_ranks(of_sum)}" for crc, of_sum in ranks.items())
    raise CollectiveMismatch(
        f"the ranks' models differ in {int(differs.sum())} of {len(sums)} tensors, the first of which is "
        f"{list(named)[first]!r} ({listed}): {cure}"
    )


@torch.no_grad()
def broadcast_tensors(named: Mapping[str, Tensor], comm: Communicator, root: int) -> None:
    """Overwrite tensors in place by rank `root`'s."""
    require_same_layout(named, comm)
    batch: list[Tensor] = []
    nbytes = 0
    for tensor in named.values():
        batch.append(tensor)
        nbytes += tensor.nbytes
        if nbytes >= _BROADCAST_BYTES:
            _broadcast_batch(batch, comm, root)
            batch, nbytes = [], 0
    if batch:
        _broadcast_batch(batch, comm, root)


def _broadcast_batch(batch: Sequence[Tensor], comm: Communicator, root: int) -> None:
    flat = torch.cat([tensor_bytes(tensor).cpu() for tensor in batch])
    received = torch.from_numpy(np.asarray(comm.broadcast(flat.numpy(), root=root)))
    parts = torch.split(received, [tensor.nbytes for tensor in batch])
    for tensor, part in zip(batch, parts, strict=True):
        # clone: a part may start at any byte, and a view of wider elements needs an aligned start
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
