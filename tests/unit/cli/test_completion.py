"""`mpicomp completion`: scripts for shells, of which bash runs its own here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomp.cli.completion import SHELLS
from mpicomp.cli.main import COMMANDS, main


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert all(name in script.read_text() for name in COMMANDS)
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["be"], {"bench"}),
        (["bench", "--topo"], {"--topology"}),
        (["bench", "--topology", "d"], {"double-tree"}),
        (["bench", "--algorithm", "mars"], {"marsit"}),
        (["bench", "--method", "mars"], {"marsit"}),
        (["advise", "--qu"], {"--quick"}),
        (["completion", "f"], {"fish"}),
        (["report", "ch"], {"check"}),
        (["bench", "--repo"], {"--report"}),
    ],
)
def test_bash_completes_commands_options_and_values(
    words: list[str], expected: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    press_tab = (
        'source "$1"; shift; COMP_WORDS=(mpicomp "$@"); COMP_CWORD=$#; function=$(complete -p mpicomp)\n'
        'function=${function##*-F }; ${function%% *}; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", press_tab, "bash", str(script), *words], capture_output=True, text=True, check=True
    )
    assert {line.strip() for line in done.stdout.splitlines()} == expected


def test_without_shtab_the_error_has_the_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err


def test_a_command_that_cannot_be_imported_is_completed_without_its_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("shtab")
    monkeypatch.setitem(sys.modules, "mpicomp.cli.bench", None)
    assert main(["completion", "bash"]) == 0
    printed = capsys.readouterr().out
    assert " bench " in printed
    assert "--quick" in printed
    assert "--baseline" not in printed
