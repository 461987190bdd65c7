"""mpicomp for PyTorch: the only package here that imports torch.

:class:`DistributedOptimizer` (``optimizer.py``) wraps any ``torch.optim`` optimizer and synchronizes in ``step``.
:class:`OneBitAdam` (``one_bit_adam.py``) is an optimizer of its own. Other ways from a training loop to an aggregator
belong beside them, one a file. ``buckets.py`` lays parameters out in flat
vectors, and ``replication.py`` makes and keeps the ranks' models equal. Tensors live on the CPU; NumPy views of them
reach the aggregators without a copy. ``process_group`` is a backend of ``torch.distributed``.
"""

from mpicomp.torch.one_bit_adam import OneBitAdam
from mpicomp.torch.optimizer import DistributedOptimizer
from mpicomp.torch.optimizer_state import broadcast_optimizer_state
from mpicomp.torch.process_group import register_backend
from mpicomp.torch.replication import average_buffers, broadcast_parameters

__all__ = [
    "DistributedOptimizer",
    "OneBitAdam",
    "average_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "register_backend",
]
