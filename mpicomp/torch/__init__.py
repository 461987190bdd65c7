"""mpicomp for PyTorch: optimizers, hooks and process groups.

``optimizer`` has :class:`DistributedOptimizer`, which wraps any ``torch.optim`` optimizer and synchronizes in ``step``,
and ``local_steps`` its mode in which ranks average the moves of several steps. ``one_bit_adam`` has :class:`OneBitAdam`
and its relatives, whose ranks exchange momenta, and ``contrib`` young ones. ``synchronizer`` has their common parts:
the phases of a step, the ranks' agreement on it, and the averages of its buckets. ``ddp`` has :func:`ddp_hook`, which
averages for DistributedDataParallel, and ``fsdp`` :func:`fsdp_hook`, for FSDP2. All of these average flat vectors of
parameters, which ``buckets`` lays out, and starts during backward. ``process_group`` is a backend of
``torch.distributed``. ``state`` saves residuals, and makes states for other numbers of ranks. ``replication.py`` and
``optimizer_state.py`` make the ranks' models and optimizers equal.

NumPy views of tensors on the CPU reach the aggregators without a copy. Tensors on GPUs go there as they are, or as
signs and codes that are made of them there (``devices.py``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicomp.torch.contrib.lion import DistributedLion as DistributedLion
    from mpicomp.torch.contrib.sign_muon import SignMuon as SignMuon
    from mpicomp.torch.ddp import DDPHookState as DDPHookState
    from mpicomp.torch.ddp import ddp_hook as ddp_hook
    from mpicomp.torch.fsdp import FSDPHook as FSDPHook
    from mpicomp.torch.fsdp import fsdp_hook as fsdp_hook
    from mpicomp.torch.fsdp import fsdp_wire as fsdp_wire
    from mpicomp.torch.one_bit_adam.one_bit_adam import OneBitAdam as OneBitAdam
    from mpicomp.torch.one_bit_adam.one_bit_lamb import OneBitLamb as OneBitLamb
    from mpicomp.torch.one_bit_adam.zero_one_adam import ZeroOneAdam as ZeroOneAdam
    from mpicomp.torch.optimizer.deepspeed_config import from_deepspeed as from_deepspeed
    from mpicomp.torch.optimizer.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
    from mpicomp.torch.optimizer_state import broadcast_optimizer_state as broadcast_optimizer_state
    from mpicomp.torch.process_group import register_backend as register_backend
    from mpicomp.torch.rank_device import local_device as local_device
    from mpicomp.torch.replication import average_buffers as average_buffers
    from mpicomp.torch.replication import broadcast_parameters as broadcast_parameters
    from mpicomp.torch.replication import require_same as require_same
    from mpicomp.torch.state.checkpoints import load_checkpoint as load_checkpoint
    from mpicomp.torch.state.checkpoints import save_checkpoint as save_checkpoint
    from mpicomp.torch.state.redistribution import redistribute_states as redistribute_states

# Loaded on first access: a script that redistributes states needs no MPI.
_NAMES = {
    "contrib.lion": "DistributedLion",
    "contrib.sign_muon": "SignMuon",
    "ddp": "DDPHookState ddp_hook",
    "fsdp": "FSDPHook fsdp_hook fsdp_wire",
    "one_bit_adam.one_bit_adam": "OneBitAdam",
    "one_bit_adam.one_bit_lamb": "OneBitLamb",
    "one_bit_adam.zero_one_adam": "ZeroOneAdam",
    "optimizer.deepspeed_config": "from_deepspeed",
    "optimizer.distributed_optimizer": "DistributedOptimizer",
    "optimizer_state": "broadcast_optimizer_state",
    "process_group": "register_backend",
    "rank_device": "local_device",
    "replication": "average_buffers broadcast_parameters require_same",
    "state.checkpoints": "load_checkpoint save_checkpoint",
    "state.redistribution": "redistribute_states",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise import_module("mpicomp.other_names").missing(__name__, name, __all__)
    return getattr(import_module(f"mpicomp.torch.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
