"""Datasets come whole and normalised, and every rank gets its share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.train.data import FASHION_MNIST_FOLDER, Sampler, load


def write_split(folder: Path, prefix: str, n: int, n_labels: int | None = None, side: int = 8) -> None:
    generator = np.random.default_rng(n)
    n_labels = n if n_labels is None else n_labels
    images = generator.integers(0, 256, (n, side, side), dtype=np.uint8)
    labels = generator.integers(0, 10, n_labels, dtype=np.uint8)
    for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
        header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
        (folder / name).write_bytes(header + array.tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_split(tmp_path, "train", 50)
    write_split(tmp_path, "t10k", 20)
    return tmp_path


def test_digits_are_split_the_same_way_every_time() -> None:
    first, second = load("digits"), load("digits")
    assert (len(first.train), len(first.test)) == (1437, 360)
    assert first.image_shape == (1, 8, 8)
    assert first.n_classes == 10
    assert torch.equal(first.train.images, second.train.images)
    assert abs(float(first.train.images.mean())) < 1e-5
    assert set(first.test.labels.tolist()) == set(range(10))


def test_any_folder_of_idx_files_is_a_dataset(folder: Path) -> None:
    data = load("idx", folder)
    assert data.train.images.shape == (50, 1, 8, 8)
    assert data.train.images.dtype == torch.float32
    assert data.test.labels.dtype == torch.int64
    assert len(data.test) == 20


@pytest.mark.skipif(not FASHION_MNIST_FOLDER.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_is_found_where_debian_puts_it() -> None:
    data = load("fashion-mnist")
    assert data.train.images.shape == (60000, 1, 28, 28)
    assert len(data.test) == 10000


def test_a_missing_folder_is_named_with_its_cure(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(ValueError, match=rf"no folder {missing}; correct --data DIR"):
        load("idx", missing)
    with pytest.raises(ValueError, match="dataset-fashion-mnist"):
        load("fashion-mnist", missing)
    with pytest.raises(ValueError, match="--dataset idx needs --data DIR"):
        load("idx")


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=rf"{folder} has neither t10k-labels-idx1-ubyte nor"):
        load("idx", folder)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"prefix": "train", "n": 50, "n_labels": 49}, "holds 50 images but train-labels-idx1-ubyte 49 labels"),
        ({"prefix": "t10k", "n": 20, "side": 9}, r"training images are \(8, 8\) and test images \(9, 9\)"),
        ({"prefix": "t10k", "n": 0}, "holds no images"),
    ],
)
def test_splits_that_do_not_fit_are_refused(folder: Path, split: dict[str, Any], message: str) -> None:
    write_split(folder, **split)
    with pytest.raises(ValueError, match=message):
        load("idx", folder)


def test_gzipped_files_are_found(folder: Path) -> None:
    import gzip

    for path in list(folder.iterdir()):
        with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        path.unlink()
    assert len(load("idx", folder).train) == 50


def test_ranks_share_an_epoch_without_overlap_and_whatever_their_number_see_the_same_batches() -> None:
    by_four = [Sampler(100, 3, rank, 4, seed=7).epoch(2) for rank in range(4)]
    assert all(indices.shape == (8, 3) for indices in by_four)
    assert len({int(index) for indices in by_four for index in indices.flatten()}) == 96
    by_two = [Sampler(100, 6, rank, 2, seed=7).epoch(2) for rank in range(2)]
    assert torch.equal(torch.cat(by_four, dim=1), torch.cat(by_two, dim=1))


def test_the_order_changes_with_epoch_and_seed_and_with_nothing_else() -> None:
    first = Sampler(100, 3, 0, 1, seed=7).epoch(2)
    assert torch.equal(first, Sampler(100, 3, 0, 1, seed=7).epoch(2))
    assert not torch.equal(first, Sampler(100, 3, 0, 1, seed=7).epoch(3))
    assert not torch.equal(first, Sampler(100, 3, 0, 1, seed=8).epoch(2))


def test_too_few_images_for_one_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="10 training images do not fill one batch of 3 on each of 4 ranks"):
        Sampler(10, 3, 0, 4, seed=0)
