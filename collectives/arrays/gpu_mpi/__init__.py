"""MPI that takes memory of GPUs (CUDA-aware, GPU-aware MPI): the library's claims, a probe, and the verdict.

The library's claim is not enough: one that was built for CUDA claims support where there is no driver, or where its
transport cannot read a GPU's memory, and then the process dies of a segmentation fault. So the claims (`claims`) only
decide whether to try, and another process tries (`child`).

Only messages between two ranks are handed such memory, never MPI's collectives. Open MPI takes it in sends, receives
and blocking collectives alone, and its MPI_Iallreduce reads it with the CPU (open-mpi.org/faq/?category=runcuda, "Which
MPI APIs do NOT work with CUDA-aware"; issues 3059, 9845 and 12045 of open-mpi/ompi). A call that blocks in MPI could
not be ended by a timeout. A process alone could not find it out either, as nothing is added where there is one rank.
Messages are bytes from any memory, so each rank decides for itself, and ranks may differ.
`collectives.execution.staged.takes_device_memory` is the verdict as steps of a call.
"""

from __future__ import annotations

from collectives.arrays.gpu_mpi.verdict import VARIABLE, mode, require_if_on

__all__ = ["VARIABLE", "mode", "require_if_on"]
