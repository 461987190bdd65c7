"""A folder `collectives` of the user's project, which Python finds before ours, is named by one error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import PROJECT


@pytest.mark.parametrize(
    "use", ["mpicomp.Communicator", "from mpicomp import Marsit", "from mpicomp.torch import ddp_hook"]
)
def test_both_folders_are_named(use: str, tmp_path: Path) -> None:
    folder = tmp_path / "collectives"
    folder.mkdir()
    (folder / "__init__.py").touch()
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PROJECT)!r}]; import mpicomp; {use}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: mpicomp needs its package 'collectives', in {PROJECT}, and Python finds"), (
        last
    )
    assert f"another first, {folder}: rename that folder" in last
