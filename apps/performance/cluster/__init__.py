"""Our all-reduces against MPI's, its tuned algorithms and Gloo's on an emulated cluster.

Started by ``sudo python -m apps.performance.cluster``.

- `grid`: which cells (hosts, rates, sizes) are measured
- `implementations`: what is compared in each, and what it should take
- `driver`: starts jobs on a standing cluster; `records`: what they leave; `sweep`: rates at which overlap is measured
- `job`, on every rank: `prepared` makes implementations callable, `tuned` chooses MPI's algorithm, `rounds` times all
- `methods`, on every rank: all methods, beside `computing`, what a training step computes
- `overlap`, on every rank: how much of computing is hidden behind the wire
- `training`: whole trainings
- `ratios`, `predicted`, `targets`, `tables`, `plots`: what is made of the records
"""
