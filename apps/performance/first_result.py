"""A fresh process on its way to the first aggregate.

``python apps/performance/first_result.py``, alone or under mpirun.
It imports as little as it can before the clock stops, so it is no part of the package. Rank 0 prints JSON: the seconds
since the process began at which each phase was over, on the slowest rank.
"""

import time


def since_start() -> float:
    """Seconds since the kernel made this process, to its clock's tick of usually 10 ms."""
    with open("/proc/self/stat") as file:  # noqa: PTH123 - pathlib takes time to import
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / TICKS_S


if __name__ == "__main__":
    import os

    TICKS_S = os.sysconf("SC_CLK_TCK")
    phases = {"interpreter": since_start()}

    import numpy as np

    import mpicomp

    comm = mpicomp.Communicator()
    phases["import and MPI"] = since_start()
    aggregator = mpicomp.Marsit(full_precision_every=None).start(comm, 1_000_000)
    phases["start"] = since_start()
    aggregator.aggregate(np.ones(1_000_000, np.float32))
    phases["first aggregate"] = since_start()

    import json

    everyones = comm.mpi_comm.gather(phases)
    if everyones is not None:
        print(json.dumps({phase: max(one[phase] for one in everyones) for phase in phases}))
    comm.close()
