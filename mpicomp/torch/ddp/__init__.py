"""Communication hook for DistributedDataParallel."""

from mpicomp.torch.ddp.hook import DDPHookState, average_bucket, ddp_hook

__all__ = ["DDPHookState", "average_bucket", "ddp_hook"]
