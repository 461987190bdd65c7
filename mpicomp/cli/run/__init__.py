"""The command ``mpicomp run``."""
