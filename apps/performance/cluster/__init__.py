"""Our all-reduces against MPI's, its tuned algorithms' and Gloo's on an emulated cluster.

Started by ``sudo python -m apps.performance.cluster``.

- `grid`: which cells (hosts, rates, sizes) are measured; `ways`: what is compared in each, and what it should take
- `drive`: jobs on a standing cluster; `records`: what they leave; `sweep`: rates at which overlap is measured
- `job`, on every rank: `sides` makes the ways callable, `tuned` chooses MPI's algorithm, `rounds` times them in turn
- `methods`, on every rank: the methods in turn, and `computing`, what a training step computes besides
- `overlap`: how much of computing is hidden behind the wire
- `figures`, `tables`, `plots`: what is made of the records
"""
