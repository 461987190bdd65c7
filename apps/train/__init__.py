"""Train an image classifier on all ranks of an MPI job: ``mpirun -n 4 python -m apps.train.__main__``."""
