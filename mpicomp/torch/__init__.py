"""mpicomp for PyTorch: the only package here that imports torch.

Three ways lead from a torch training loop to an aggregator, and each has one file:

- :class:`DistributedOptimizer` (``optimizer.py``) wraps any ``torch.optim`` optimizer and synchronizes in ``step``;
- a DistributedDataParallel communication hook belongs in ``ddp.py`` (``ddp_hook``);
- a ``torch.distributed`` process group belongs in ``process_group.py`` (``register_backend``);
- optimizers that are themselves compression methods belong beside them, one a file (``OneBitAdam``).

They share ``buckets.py``, which lays parameters out in flat vectors, and ``replicas.py``, which makes and keeps
the ranks' models equal. Tensors live on the CPU; NumPy views of them reach the aggregators without a copy.
"""

from mpicomp.torch.optimizer import DistributedOptimizer
from mpicomp.torch.replication import average_buffers, broadcast_parameters

__all__ = ["DistributedOptimizer", "average_buffers", "broadcast_parameters"]
