"""What docs/performance-tables.md is made of: ``python -m benchmarks.run_all`` measures all and writes its tables.

Each part is a module that can be run alone, with ``--quick`` in a small form:

- ``python -m benchmarks.kernels``: kernels against NumPy, one core
- ``python -m benchmarks.codecs``: codecs against NumPy, one core
- ``python -m benchmarks.entropy``: entropy coding of quantizer codes, one core
- ``mpirun -n 2 python -m benchmarks.allreduce``: all methods against MPI_Allreduce, 100 MB
- ``mpirun -n 2 python -m benchmarks.dense_sizes``: the dense all-reduce against MPI_Allreduce, 4 KiB to 400 MB
- ``mpirun -n 2 python -m benchmarks.small_calls``: what a small call costs beyond MPI and beyond its kernels
- ``python -m benchmarks.startup``: time to the first result of a fresh process
- ``mpirun -n 2 python -m benchmarks.memory``: peak memory of an aggregate
- ``mpirun -n 8 python -m benchmarks.cascading``: what cascading compression leaves of signs and amplitude
- ``python -m benchmarks.learning``: accuracy against the dense all-reduce
- ``sudo python -m benchmarks.cluster``: all-reduces on an emulated cluster; no part of ``run_all``, as it needs root
"""
