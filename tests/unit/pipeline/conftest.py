"""Fixtures for tests of stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from mpicomp.pipeline import FileMessageStore, MessageStore, Store


class Made(Protocol):
    """Make a store of one of the kinds."""

    def __call__(self, examples: int, row_shape: Any, **options: Any) -> Store: ...


@pytest.fixture
def in_file(tmp_path: Path) -> Iterator[Made]:
    """Make stores in files of their own, which are closed after the test."""
    with ExitStack() as stack:

        def make(examples: int, row_shape: Any, **options: Any) -> Store:
            path = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
            store = FileMessageStore(path, examples, row_shape, fingerprint="run", **options)
            stack.callback(store.close)
            return store

        yield make


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, in_file: Made) -> Made:
    """Make stores of either kind."""
    return MessageStore if request.param == "memory" else in_file


class Halves:
    """A codec of rows in a test: the upper half of each float32 number, so that rows are no longer what was written."""

    rounding = "nearest"

    def __repr__(self) -> str:
        return "Halves()"

    def nbytes(self, rows: int, columns: int) -> int:
        return 2 * rows * columns

    def encode(self, values: Any, payload: Any, draw: Any) -> None:
        if not np.isfinite(values).all():
            raise ValueError("the values contain NaN or infinity")
        payload.view(np.uint16)[:] = values.reshape(-1).view(np.uint32) >> 16

    def decode(self, payload: Any, values: Any) -> None:
        values.reshape(-1)[:] = (payload.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def halves() -> Halves:
    """Give a codec of rows."""
    return Halves()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the test's store is; messages must survive the name."""
    return tmp_path / "store 100%d"
