"""A small report of `mpicomp bench --report` for tests."""

from __future__ import annotations

from typing import Any


def call(name: str, *seconds: float, **others: Any) -> dict[str, Any]:
    """Return timed calls, of which an odd number has its median in the middle."""
    return {"name": name, "seconds": list(seconds), "median_s": sorted(seconds)[len(seconds) // 2], **others}


def sample() -> dict[str, Any]:
    """Return a valid report of two nodes with two ranks each."""
    return {
        "schema": 1,
        "date": "2026-01-31",
        "machine": {
            "cpus": ["Intel(R) Xeon(R) CPU @ 2.20GHz"],
            "cores_per_node": 16,
            "memory_gb_per_node": 128.5,
            "load_per_core": 0.0,
            "gpus_per_node": [{"name": "NVIDIA H100 80GB HBM3", "count": 4}],
        },
        "ranks_per_node": [2, 2],
        "mpi": {"library": "Open MPI", "version": "5.0.8"},
        "versions": {
            "mpicomp": "0.1.0", "python": "3.13.0rc1", "mpi4py": "4.1.0", "numpy": "2.3.1", "numba": "0.62.0",
            "torch": None,
        },
        "network": {
            "latency_s": 1e-6, "bandwidth_bytes_s": 2e9, "overhead_s": 0.0, "group_size": 2,
            "between_latency_s": 5e-5, "uplink_bytes_s": 1.25e8,
        },
        "allreduce": [
            {
                "bytes": 1_000_000,
                "skipped": None,
                "best_dense": "MPI ring",
                "calls": [
                    call("dense ring", 0.03, 0.02, 0.025, bytes_sent_per_rank=1_500_000),
                    call("MPI ring", 0.02, 0.02, 0.5, bytes_sent_per_rank=None),
                    call("marsit", 0.002, 0.001, 0.001, bytes_sent_per_rank=46_875),
                ],
            },
            {"bytes": 400_000_000, "skipped": "memory", "best_dense": None, "calls": []},
        ],
        "training": {
            "skipped": None,
            "parameters": 10_000_000,
            "steps": [call("alone", 0.1, 0.2, 0.3), call("dense", 0.5, 0.6, 0.7), call("relay", 0.3, 0.3, 0.3)],
        },
        "budget_minutes": 5,
        "took_seconds": 123.4,
    }  # fmt: skip
