"""Young methods, with few trainings behind them, and methods for comparison, a file each.

Methods that users choose are in `mpicomp.algorithms`. Both have the same rules for names, states and tests.
"""
