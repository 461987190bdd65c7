"""Optimizers whose steps synchronize the ranks: a wrapper of any torch optimizer, and 1-bit Adam."""

from mpicomp.torch.one_bit_adam.one_bit_adam import OneBitAdam
from mpicomp.torch.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "OneBitAdam"]
