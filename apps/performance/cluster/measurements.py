"""The table of measurements that have clusters to themselves, by the names of their parts."""

from __future__ import annotations

from apps.performance.cluster import (
    backward,
    methods,
    overlap,
    pipeline_grid_tables,
    pipeline_tables,
    steps,
    two_levels,
)
from apps.performance.cluster.driver import ClusterMeasurement

MEASUREMENTS: dict[str, ClusterMeasurement] = {
    one.part: one
    for one in (
        overlap.MEASUREMENT,
        methods.MEASUREMENT,
        backward.MEASUREMENT,
        steps.MEASUREMENT,
        pipeline_tables.MEASUREMENT,
        pipeline_grid_tables.MEASUREMENT,
        two_levels.MEASUREMENT,
    )
}
