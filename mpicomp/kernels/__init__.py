"""Numba kernels: arrays and scalars in, `out` last; they release the GIL, allocate nothing and validate nothing."""
