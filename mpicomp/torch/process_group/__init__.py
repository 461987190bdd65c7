"""The backend "mpicomp" of `torch.distributed`: process groups over MPI, of tensors on the CPU and on GPUs.

A call goes through these files: ``methods.py`` has what PyTorch calls; ``moving.py``, ``reducing.py`` and ``sparse.py``
make an ``operation.py`` of it; ``calls.py`` makes that a call of the communicator, and a ``work.py`` for the caller. In
the progress thread ``movement.py`` and ``reduction.py`` carry it out. ``messages.py`` has messages between two ranks,
``packed.py`` the memory of tensors, ``group.py`` how groups begin and end, ``bootstrap.py`` how ranks find each other.
"""

from mpicomp.torch.process_group.group import MPIProcessGroup
from mpicomp.torch.process_group.registration import register_backend

__all__ = ["MPIProcessGroup", "register_backend"]
