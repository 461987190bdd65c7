"""The files of one checkpoint, as they are read: every one is compared with its SHA-256 first."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from apps.train.run_records import MOST_DIGITS
from collectives.json_file import fields, parse_json
from collectives.regular_file import open_regular
from mpicomp.state.state_file import join

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
_MOST_BYTES = 1 << 24  # of a manifest
LEAVES = {"tensor": Tensor, "array": np.ndarray}
"""Of a state: types that are kept as tensors, and what its text calls them."""


class CheckpointFiles:
    """A checkpoint's folder, whose manifest is whole.

    Parameters
    ----------
    path
        Of the folder.
    cure
        For the messages: what to do if a file is missing or damaged.

    Attributes
    ----------
    ranks
        By how many it was written.
    options
        Of the run.

    Raises
    ------
    ValueError
        In reading, too: a file is missing, truncated, altered or of another program.
    """

    def __init__(self, path: Path, cure: str) -> None:
        self.path, self.cure = path, cure
        manifest = self._manifest()
        self.ranks: int = manifest["ranks"]
        self.options: dict[str, Any] = manifest["header"]["options"]
        self._sha256: dict[str, Any] = manifest["sha256"]

    def model(self) -> dict[str, Tensor]:
        """The tensors of the model."""
        self.verify(MODEL)
        return self._tensors(MODEL)[0]

    def state(self, rank: int) -> Any:
        """The state of a rank, from a file that is verified. Its tensors lie in the file, until they are written to."""
        name = rank_file(rank)
        tensors, text = self._tensors(name)
        try:
            return joined(text, tensors)
        except Exception as error:  # the text may be anything: nothing but its SHA-256 has been looked at
            raise ValueError(f"{self.path / name} holds no state of apps.train ({error!r}); {self.cure}") from error

    def verify(self, name: str) -> None:
        """Compare a file with its SHA-256."""
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; {self.cure}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self._sha256.get(name):
            raise ValueError(f"{path} is truncated or altered (its SHA-256 is not that of the manifest); {self.cure}")

    def _manifest(self) -> dict[str, Any]:
        path = self.path / MANIFEST
        try:
            with open_regular(path) as file:
                content = file.read(_MOST_BYTES).decode()
            manifest: dict[str, Any] = parse_json(content, most_digits=MOST_DIGITS)
            fields(fields(manifest, ranks=int, header=dict, sha256=dict)["header"], options=dict)
            if manifest["ranks"] < 1:
                raise ValueError(f"its 'ranks' is {manifest['ranks']}")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is missing or damaged ({error}); {self.cure}") from error
        return manifest

    def _tensors(self, name: str) -> tuple[dict[str, Tensor], str]:
        """Return the tensors of a file and the text next to them."""
        try:
            with safe_open(self.path / name, framework="pt") as file:
                names, metadata = file.keys(), file.metadata() or {}
                return {key: file.get_tensor(key) for key in names}, metadata.get("state", "")
        except SafetensorError as error:
            raise ValueError(f"{self.path / name} is damaged ({error}); {self.cure}") from error


def rank_file(rank: int) -> str:
    """The name of the file with a rank's state."""
    return f"rank-{rank:05d}.safetensors"


def joined(text: str, tensors: dict[str, Tensor]) -> Any:
    """The state of which `mpicomp.state.state_file.split` made this text and these leaves."""
    return join(text, {"tensor": tensors.__getitem__, "array": lambda key: tensors[key].numpy()})
