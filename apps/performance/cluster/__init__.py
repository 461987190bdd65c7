"""Our all-reduces against MPI's, its tuned algorithms and Gloo's on an emulated cluster.

Started by ``sudo python -m apps.performance.cluster``.

- `grid`: which cells (hosts, rates, sizes) are measured
- `implementations`: the all-reduces that are compared in each, and their predicted times
- `driver`: starts the jobs of a measurement whose records are missing; `records`: their files
- `measurements`: the table of those that have clusters to themselves
- `job`, on every rank: `prepared` makes implementations callable, `rounds` times all
- `methods`: all methods during the backward of a training step; `training`: whole trainings
- `pipeline`: stages of one model that send activations in few bits; `pipeline_tables`: its tables
- `pipeline_grid`: replicas of such stages, which average gradients in few bits too; `pipeline_grid_tables`: its tables
- `two_levels`: methods between nodes of several ranks, and sums within a node
- `overlap`: how much of computing is hidden behind the wire
- `ratios`, `predicted`, `targets`, `tables`, `plots`: results of the records
"""
