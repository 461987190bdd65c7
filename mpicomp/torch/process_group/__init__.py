"""Backend "mpicomp" of `torch.distributed`: process groups over MPI, of tensors on the CPU and on GPUs.

`mpi_process_group.py` has the methods that PyTorch calls, and `collective.py` the table of collectives. `engine.py`
checks and packs the tensors of a call by a row of the table, begins a call of the communicator, and returns a work
(`work.py`); it has messages between two ranks, too. In the progress thread `transfers.py` moves and reduces the bytes.
`tensor_memory.py` has packed and pinned tensors, and `registration.py` makes ranks meet.
"""

from mpicomp.torch.process_group.mpi_process_group import MPIProcessGroup
from mpicomp.torch.process_group.registration import register_backend

__all__ = ["MPIProcessGroup", "register_backend"]
