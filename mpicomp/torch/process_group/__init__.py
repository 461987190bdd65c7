"""The backend "mpicomp" of `torch.distributed`: process groups of CPU tensors over MPI.

``group.py`` has the methods that PyTorch calls, ``operations.py`` what each of them moves, ``movement.py`` and
``reduction.py`` how it moves and what is computed, ``messages.py`` messages between two ranks, ``work.py`` what callers
get, and ``bootstrap.py`` how ranks find each other.
"""

from mpicomp.torch.process_group.group import MPIProcessGroup
from mpicomp.torch.process_group.registration import register_backend

__all__ = ["MPIProcessGroup", "register_backend"]
