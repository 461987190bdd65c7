"""Kernels of `mpicomp.kernels.cpu` for GPUs, in Triton: the same functions, parameters and bits, of torch tensors.

The CPU's docstrings describe both. Words (uint64), indices (uint32) and 16-bit floats are int64, int32 and int16
tensors of the same bits. Tensors are contiguous and lie on the current device; scalars, schedules and tables are
numbers and NumPy arrays in host memory. Working memory, `powers`, `tiny` and `streaming` are not used. The number or
bool that a CPU kernel returns is a 0-d tensor on the device: no function waits for the device. A NaN may be another
than the CPU's.
"""

from __future__ import annotations

import triton

OLDEST = (3, 4)  # from which on histograms have masks, and loops without products of matrices are pipelined

if tuple(int(number) for number in triton.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"kernels for device 'cuda' need Triton 3.4 or newer; {triton.__version__} is installed")
