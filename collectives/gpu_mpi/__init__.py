"""Whether MPI itself may be handed memory of GPUs (CUDA-aware, GPU-aware MPI), and who says so.

The library's word is not enough: one that was built for CUDA says yes where no driver is, or where the transport that
it takes cannot read a GPU's memory, and then the process dies of a segmentation fault. So what it says (`claims`) only
decides whether to try, and a process beside this one tries (`probe`).

Only messages between two ranks are handed such memory, never MPI's collectives. Open MPI takes it in sends, receives
and blocking collectives alone, and its MPI_Iallreduce reads it with the CPU (open-mpi.org/faq/?category=runcuda, "Which
MPI APIs do NOT work with CUDA-aware"; issues 3059, 9845 and 12045 of open-mpi/ompi). A call that blocks in MPI could
not be ended by a timeout. A process alone could not find it out either, as nothing is added where there is one rank.
Messages are bytes, whatever memory they come from, so each rank decides for itself, and ranks may differ.
"""

from __future__ import annotations

from collectives.gpu_mpi.settings import VARIABLE, mode
from collectives.gpu_mpi.verdict import allowed, require_if_on

__all__ = ["VARIABLE", "allowed", "mode", "require_if_on"]
