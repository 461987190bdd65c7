"""Communication hook for DistributedDataParallel."""

from mpicomp.torch.ddp.hook import average_bucket, ddp_hook
from mpicomp.torch.ddp.hook_state import DDPHookState

__all__ = ["DDPHookState", "average_bucket", "ddp_hook"]
