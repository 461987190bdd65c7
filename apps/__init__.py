"""Programs built on mpicomp, run from a checkout: ``mpirun -n 4 python -m apps.train``."""
