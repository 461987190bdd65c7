"""Our all-reduces against MPI's, its tuned algorithms and Gloo's on an emulated cluster.

Started by ``sudo python -m apps.performance.cluster``.

- `grid`: which cells (hosts, rates, sizes) are measured
- `implementations`: what is compared in each, and what it should take
- `driver`: starts the jobs of a measurement whose records are missing; `records`: what they leave
- `measurements`: the table of those that have clusters to themselves
- `job`, on every rank: `prepared` makes implementations callable, `rounds` times all
- `methods`: all methods, beside what a training step computes; `training`: whole trainings
- `pipeline`: stages of one model that send activations in few bits; `pipeline_tables`: its tables
- `pipeline_grid`: replicas of such stages, which average gradients in few bits too; `pipeline_grid_tables`: its tables
- `two_levels`: methods between nodes of several ranks, and sums within a node
- `overlap`: how much of computing is hidden behind the wire
- `ratios`, `predicted`, `targets`, `tables`, `plots`: what is made of the records
"""
