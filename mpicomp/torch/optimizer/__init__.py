"""Optimizers whose steps synchronize the ranks: a wrapper of any torch optimizer, and 1-bit Adam."""

from mpicomp.torch.optimizer.distributed_optimizer import DistributedOptimizer
from mpicomp.torch.optimizer.one_bit_adam import OneBitAdam

__all__ = ["DistributedOptimizer", "OneBitAdam"]
