"""A folder `collectives` of the user's project, which Python finds before ours, is named by one error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import PROJECT


@pytest.mark.parametrize("is_package", [True, False])
@pytest.mark.parametrize("use", ["import mpicomp", "from mpicomp.torch import ddp_hook", "import mpicomp.pipeline"])
def test_both_places_are_named(use: str, is_package: bool, tmp_path: Path) -> None:
    place = tmp_path / "collectives" if is_package else tmp_path / "collectives.py"
    file = place / "__init__.py" if is_package else place
    file.parent.mkdir(exist_ok=True)
    file.touch()
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PROJECT)!r}]; {use}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: mpicomp needs its package 'collectives', in {PROJECT}, and Python finds"), (
        last
    )
    assert f"another first, {place}: rename it" in last
