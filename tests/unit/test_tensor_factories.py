"""Tensors that the packages make: none depends on the caller's default device or default dtype."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.documents import PROJECT

FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros",
}  # fmt: skip


def calls_without(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each call of a factory of PyTorch that leaves out `device` or `dtype`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            module = ast.unparse(node.func.value).rpartition(".")[2]
            if module in ("torch", "_torch") and not {"device", "dtype"} <= {one.arg for one in node.keywords}:
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("package", ["collectives", "mpicomp"])
def test_each_factory_of_tensors_has_a_device_and_a_dtype(package: str) -> None:
    paths = sorted((PROJECT / package).rglob("*.py"))
    found = [
        f"{path.relative_to(PROJECT)}:{line}: {call}"
        for path in paths
        for line, call in calls_without(path.read_text(encoding="utf-8"))
    ]
    assert paths
    assert not found, "\n".join(found)


@pytest.mark.parametrize("call", ["torch.zeros(3)", "self._torch.empty(3, dtype=x.dtype)", "torch.tensor(1, device=d)"])
def test_the_scan_finds_a_call_without_them(call: str) -> None:
    assert list(calls_without(call))
    assert not list(calls_without("torch.zeros(3, dtype=a, device=b), np.zeros(3), torch.zeros_like(x)"))
