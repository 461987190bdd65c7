"""mpicomp for PyTorch: the only package here that imports torch.

:class:`DistributedOptimizer` (``optimizer.py``) wraps any ``torch.optim`` optimizer and synchronizes in ``step``.
:class:`OneBitAdam` (``one_bit_adam.py``) is an optimizer of its own. :func:`ddp_hook` (``ddp_hook.py``) averages for
DistributedDataParallel. Other ways from a training loop to an aggregator belong beside them, one a file. ``buckets.py``
lays parameters out in flat vectors, and ``replication.py`` makes and keeps the ranks' models equal. Tensors live on the
CPU; NumPy views of them reach the aggregators without a copy.
"""

from mpicomp.torch.ddp_hook import ddp_hook
from mpicomp.torch.ddp_hook_state import DDPHookState
from mpicomp.torch.one_bit_adam import OneBitAdam
from mpicomp.torch.optimizer import DistributedOptimizer
from mpicomp.torch.optimizer_state import broadcast_optimizer_state
from mpicomp.torch.replication import average_buffers, broadcast_parameters

__all__ = [
    "DDPHookState",
    "DistributedOptimizer",
    "OneBitAdam",
    "average_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ddp_hook",
]
