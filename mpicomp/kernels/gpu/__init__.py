"""Kernels of `mpicomp.kernels.cpu` for GPUs, in Triton: the same functions, parameters and bits, of torch tensors.

Words (uint64) are int64 tensors of the same bits, 16-bit floats int16 tensors. Tensors are contiguous and lie on the
current device; scalars, schedules and tables are numbers and NumPy arrays in host memory. What a CPU kernel returns, a
number or a bool, is a 0-d tensor on the device: no function waits for the device. A NaN may be another than the CPU's.
"""

from __future__ import annotations

import triton

OLDEST = (3, 4)  # from which on histograms have masks, and loops without products of matrices are pipelined

if tuple(int(number) for number in triton.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"kernels for device 'cuda' need Triton 3.4 or newer; {triton.__version__} is installed")
