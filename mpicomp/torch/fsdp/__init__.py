"""FSDP2: compressed means of shards between nodes, and collectives of shards in fewer bits."""

from mpicomp.torch.fsdp.model_hooks import fsdp_hook
from mpicomp.torch.fsdp.shard_hook import FSDPHook
from mpicomp.torch.fsdp.wire import fsdp_wire

__all__ = ["FSDPHook", "fsdp_hook", "fsdp_wire"]
