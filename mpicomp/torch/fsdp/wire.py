"""Collectives of FSDP2 whose messages have fewer bits, for groups of ranks that span nodes.

Weights are gathered for forward and backward: each rank encodes its shards, and all ranks decode the same bytes, the
shards of their own included, so that all ranks compute with the same weights. The optimizer keeps its shards in full
precision, so rounding errors do not add up. Gradients are rounded once, and added in float32 in the order of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from collectives.annotations import override
from collectives.quoting import list_ranks, shown
from mpicomp.codecs import Clipping, Codec, Draw, Quantizer, Ternary
from mpicomp.codecs.base import varies
from mpicomp.kernels.streams import Stream
from mpicomp.torch.fsdp import job_agreement
from mpicomp.torch.fsdp.parameter_groups import ParameterGroup, parameter_groups
from mpicomp.torch.process_group.transfers import Reduction
from mpicomp.torch.process_group.work import NO_TIMEOUT

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_STATUS_BYTES = 8  # in front of a payload, so that it stays aligned: 0, or 1 for weights without a code


class _DecodedWork(dist.Work):
    """Work of an all-gather whose result is decoded by `wait`."""

    def __init__(self, work: dist.Work, decode: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._decode = work, decode

    @override
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._work.wait()
        self._decode()
        return True


class CompressedAllGather(DefaultAllocMixin, AllGather):
    """All-gather of FSDP's weights whose messages are encoded, and decoded on all ranks, the sender's own too."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Overwrite the output, [ranks * n], with the decoded weights of all ranks."""
        sent = self._encoded(input_tensor, group.rank()) if input_tensor.is_floating_point() else input_tensor
        encoded = sent is not input_tensor
        received = sent.new_empty(group.size() * sent.numel()) if encoded else output_tensor
        work: dist.Work | None = dist.all_gather_single(received, sent, group=group, async_op=async_op)
        if not encoded:
            return work
        decode = partial(self._decode, received.view(group.size(), -1), output_tensor.view(group.size(), -1))
        if work is not None:
            return _DecodedWork(work, decode)
        decode()
        return None

    @abstractmethod
    def _encoded(self, values: Tensor, rank: int) -> Tensor:
        """Return the message of a rank's shards; the shards themselves if they are short enough."""

    @abstractmethod
    def _decode(self, messages: Tensor, values: Tensor) -> None:
        """Overwrite `values`, [ranks, n], with those in the messages, a row for each rank."""


class RoundedAllGather(CompressedAllGather):
    """All-gather of FSDP's weights in "bfloat16" or "float16"."""

    def __init__(self, dtype: str) -> None:
        self._dtype = _TYPES[dtype]

    @override
    def _encoded(self, values: Tensor, rank: int) -> Tensor:
        return values if values.element_size() <= 2 else values.to(self._dtype)

    @override
    def _decode(self, messages: Tensor, values: Tensor) -> None:
        values.copy_(messages)


class QuantizedAllGather(CompressedAllGather):
    """All-gather of FSDP's weights by a codec.

    Parameters
    ----------
    codec : Codec
    stream : Stream
        Random words of the module.
    """

    def __init__(self, codec: Codec, stream: Stream) -> None:
        self._codec, self._stream = codec, stream

    @override
    def _encoded(self, values: Tensor, rank: int) -> Tensor:
        codec, flat = self._codec, values.float().numpy()
        message = np.zeros(_STATUS_BYTES + codec.nbytes(flat.size), np.uint8)
        # neither step nor call: backward gathers the weights of forward again, and must get the same ones
        draw = Draw(self._stream, step=0, rank=rank)
        try:
            codec.encode(flat, message[_STATUS_BYTES:], draw=draw)
        except (ValueError, OverflowError):  # `_decode` raises an error on all ranks
            message[0] = 1
        return torch.from_numpy(message)

    @override
    def _decode(self, messages: Tensor, values: Tensor) -> None:
        bad = torch.nonzero(messages[:, 0]).flatten().tolist()
        if bad:
            raise ValueError(
                f"{job_agreement.here()}: the weights on {list_ranks(bad)} of the FSDP group contain NaN or infinity, "
                "or are too large for the codec: training diverged; resume from an earlier checkpoint"
            )
        decoded = np.empty(values.shape[1], np.float32)
        for row, message in zip(values, messages.numpy(), strict=True):
            self._codec.decode(message[_STATUS_BYTES:], decoded, weight=1)
            row.copy_(torch.from_numpy(decoded))


class RoundedReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Reduce-scatter of FSDP's gradients, rounded to 16 bits and added in float32; see :func:`mpicomp.torch.fsdp_wire`.

    Parameters
    ----------
    gradients : "bfloat16" or "float16"
        Type of the gradients in messages.
    """

    def __init__(self, gradients: str) -> None:
        self._dtype = _TYPES[gradients]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Overwrite the output, [n], with the sum or mean of this rank's part of all ranks' inputs, [ranks * n].

        The result is there when the call returns, also with `async_op`.
        """
        if input_tensor.element_size() <= 2:
            work: dist.Work | None = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
            return work
        reduction = Reduction.of(op, output_tensor.dtype)
        if reduction.name not in ("SUM", "AVG", "PREMUL_SUM"):
            raise ValueError(f"{reduction.name} of rounded gradients is not supported")
        sent = reduction.scaled(input_tensor).to(self._dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        rows = received.view(group.size(), -1)
        output_tensor.copy_(rows[0])
        for row in rows[1:]:
            output_tensor.add_(row)
        if reduction.mean:
            output_tensor.div_(group.size())
        return None


def fsdp_wire(
    model: torch.nn.Module, weights: str | Codec | None = None, gradients: str | None = None, *, seed: int = 0
) -> None:
    """Send FSDP2's weights and gradients in fewer bits, where a group of shards spans nodes. Collective.

    Sets the custom collectives of every FSDP module in the model, of any backend of ``torch.distributed``. Call it
    again to change them. All ranks of the default process group make the call.

    Parameters
    ----------
    model : Module
        The module that ``fully_shard`` was called on, and whose modules it was called on.
    weights : "bfloat16", "float16", Codec or None
        Form in which weights are gathered: rounded to 16 bits, or by a `Quantizer` or `Clipping`, which encode on the
        CPU. All ranks decode the same weights, in forward and in backward. The optimizer's shards stay as they are.
        None: FSDP's own all-gather.
    gradients : "bfloat16", "float16" or None
        Type in which gradients travel to the rank that holds their shard, which adds them in float32, in the order of
        ranks. None: FSDP's own reduce-scatter.
    seed : int
        Seed by which a `Quantizer` rounds. Each element has a random number of its own, the same one at all steps.

    Raises
    ------
    ValueError
        The model is not sharded, or an option is out of range.
    TypeError
        An argument is something else.
    CollectiveMismatch
        Another rank raised one of these, or the ranks' options differ.

    Notes
    -----
    Tensors that have 16 bits already, as under ``MixedPrecisionPolicy``, are sent as they are, unless by a codec.
    Gradients larger than 65504 are infinite in float16. ``backward()`` and ``forward()`` raise ValueError, on all ranks
    of the group, if weights have no code.

    References
    ----------
    Markov et al., "Quantized Distributed Training of Large Models with Convergence Guarantees", ICML 2023, arXiv
    2302.02390, which quantizes weights in FSDP's all-gathers.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> from mpicomp.codecs import Quantizer
    >>> from mpicomp.torch import fsdp_wire, register_backend
    >>> register_backend()
    >>> torch.distributed.init_process_group("mpicomp")
    >>> model = fully_shard(torch.nn.Linear(3, 1), mesh=init_device_mesh("cpu", (1,)))
    >>> fsdp_wire(model, weights=Quantizer(bucket=512, levels=127), gradients="bfloat16")
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> torch.distributed.destroy_process_group()
    """
    job_agreement.require_process_group("fsdp_wire")

    def check() -> list[ParameterGroup]:
        groups = parameter_groups(model)
        _require_weights(weights, groups[0].device)
        if gradients is not None and gradients not in _TYPES:
            raise ValueError(f'gradients is {gradients!r}; choose "bfloat16", "float16" or None')
        return groups

    text = f"weights={weights}, gradients={gradients}, seed={seed}"
    groups = job_agreement.agreed("fsdp_wire", check, lambda _: text, (ValueError, TypeError))
    for number, group in enumerate(groups):
        group.set_collectives(
            _all_gather(weights, Stream(seed, number, "fsdp weights")),
            None if gradients is None else RoundedReduceScatter(gradients),
        )


def _all_gather(weights: str | Codec | None, stream: Stream) -> AllGather | None:
    if weights is None:
        return None
    return RoundedAllGather(weights) if isinstance(weights, str) else QuantizedAllGather(weights, stream)


def _require_weights(weights: object, device: torch.device) -> None:
    if weights is None or (isinstance(weights, str) and weights in _TYPES):
        return
    if not isinstance(weights, Quantizer | Clipping) or isinstance(weights, Ternary):
        raise ValueError(
            f'weights is {shown(weights)}; choose "bfloat16", "float16", None, or a Quantizer or Clipping of '
            "mpicomp.codecs"
        )
    if varies(weights):
        raise ValueError(f'{weights} makes messages of different lengths; choose coding="fixed"')
    if device.type != "cpu":
        raise ValueError(f'the model is on {device}, and codecs encode weights on the CPU; choose "bfloat16"')
