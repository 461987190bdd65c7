"""Description of machines for reports: names of products and version numbers alone."""

from __future__ import annotations

import pytest

from mpicomp.cli.cluster_report import machine
from mpicomp.cli.cluster_report.machine import number, product


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Intel(R)  Xeon(R)\tCPU @ 2.20GHz", "Intel(R) Xeon(R) CPU @ 2.20GHz"),
        ("QEMU on node17.cluster.example", "unknown"),
        ("/home/ada/cpu", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_text_that_may_be_a_name_of_a_host_stays_out(text: str, name: str) -> None:
    assert product(text) == name


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.5.1+cu124", "2.5.1"), ("3.13.0rc1", "3.13.0rc1"), ("0.1.0.dev3+ada.node17", "0.1.0"), ("main", "unknown")],
)
def test_a_version_loses_its_local_part(text: str, version: str) -> None:
    assert number(text) == version


def test_a_node_has_cores_memory_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA A100", "NVIDIA A100"])
    found = machine.describe_node()
    assert found["gpus"] == {"NVIDIA A100": 2}
    assert found["cores"] > 0
    assert found["memory_gb"] > 0
    assert 0 < machine.free_bytes() <= 1e9 * found["memory_gb"] + 1e8
