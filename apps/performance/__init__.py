"""Programs that measure the figures of docs/performance-tables.md; ``python -m apps.performance.run_all`` writes it.

Each part is a module that can be run alone. ``--quick`` runs it in a small form.

- ``python -m apps.performance.kernels``: kernels against NumPy, one core
- ``python -m apps.performance.codecs``: codecs against NumPy, one core
- ``python -m apps.performance.rows``: codecs of activations against a copy, one core
- ``python -m apps.performance.entropy``: entropy coding of quantizer codes, one core
- ``python -m apps.performance.threads``: calls with one thread and with several, one rank
- ``python -m apps.performance.gpu_kernels``: the kernels for GPUs against a copy there
- ``mpirun -n 2 python -m apps.performance.gpu_allreduce``: Marsit on GPUs against dense sums and NCCL
- ``mpirun -n 1 python -m apps.performance.gpu_training``: a transformer's step on a GPU, alone and with Marsit
- ``mpirun -n 2 python -m apps.performance.allreduce``: one-bit and dense all-reduces against MPI_Allreduce, 100 MB
- ``mpirun -n 2 python -m apps.performance.dense_sizes``: the dense all-reduce against MPI_Allreduce, 4 KiB to 400 MB
- ``mpirun -n 2 python -m apps.performance.small_calls``: cost of a small call beyond MPI and beyond its kernels
- ``mpirun -n 2 python -m apps.performance.auto``: cost of a call of Auto once it has chosen; not in ``run_all``
- ``mpirun -n 1 python -m apps.performance.wrapper``: the optimizer's wrapper on one rank
- ``mpirun -n 2 python -m apps.performance.torch_backend``: calls of torch.distributed, over "mpicomp" and over Gloo
- ``mpirun -n 4 python -m apps.performance.torch_load``: all-reduces of it where ranks share cores
- ``mpirun -n 2 python -m apps.performance.power_sgd``: PowerSGD in training against PyTorch's own hook
- ``mpirun -n 2 python -m apps.performance.pipeline_store``: cost of the store of messages in a pipeline's step
- ``python -m apps.performance.startup``: time to the first result of a fresh process
- ``mpirun -n 2 python -m apps.performance.memory``: peak memory of an aggregate
- ``python -m apps.performance.idle_memory``: speed of memory that was idle, and of memory that processors share
- ``python -m apps.performance.compare_checkouts``: two checkouts, whose own programs are run in turn
- ``python -m apps.performance.turn_by_turn``: two checkouts, call by call in turn
- ``sudo python -m apps.performance.cluster``: all-reduces on an emulated cluster; needs root, so ``run_all`` omits it
"""
