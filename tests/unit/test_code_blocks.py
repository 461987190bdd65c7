"""Every block of code of README and docs: Python runs in tests/mpi/test_readme.py, and commands are read here.

A command of ours is started with its arguments and ends where it has read them, so each option and its value is one
that the program takes. Of other programs the files, targets, extras and packages that the command names must exist.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.documents import DOCUMENTS, PROJECT, blocks

RUN = {"python", "diff"}  # by tests/mpi/test_readme.py and tests/mpi/test_migrating.py
SHELL = {"sh", "bash"}
OUTPUT = {"", "text"}
"""Languages of blocks that are printed by a program or drawn."""
PARSED = {"toml": tomllib.loads}
LAUNCHERS = {"mpirun": {"-n", "--bind-to", "--oversubscribe"}, "srun": {"--mpi", "-n"}, "sudo": set()}
"""Programs that start the command behind them, and their options in docs. `--mca` has two values more."""
NOT_RUN = {
    "sbatch": "Slurm's; the script and the arguments behind it are read",
    "cd": "of the shell",
    "export": "of the shell",
    "mkdir": "of the system",
}
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
DOCUMENTED = [
    (document, language, code) for document in DOCUMENTS for _, language, code in FENCE.findall(document.read_text())
]
SEPARATORS = {"&&", "||", "|", ";", "&"}
REDIRECTIONS = {">", ">>", "<"}


class CommandLineRead(BaseException):
    """A program has read its command line."""


def shell_commands(document: Path) -> Iterator[list[str]]:
    """Give the words of each command in the shell blocks of a page."""
    for page, language, code in DOCUMENTED:
        if page != document or language not in SHELL:
            continue
        for line in code.replace("\\\n", " ").splitlines():
            words: list[str] = []
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            rest = iter([*lexer, ";"])
            for word in rest:
                if word in REDIRECTIONS:
                    next(rest)
                elif word not in SEPARATORS:
                    words.append(word)
                elif words:
                    yield words
                    words = []


def started(words: list[str]) -> list[str]:
    """Return a command without assignments and without the launchers in front of it."""
    while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in LAUNCHERS):
        options = LAUNCHERS.get(words.pop(0))
        while options is not None and words and words[0].startswith("-"):
            option, _, value = words.pop(0).partition("=")
            if option == "--mca":
                del words[:2]
            elif option in options:
                del words[: 0 if value else 1]
            else:
                raise AssertionError(f"unknown option of a launcher: {option}")
    return words


def read(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start a module or a script until it has read its arguments; return those that it does not know."""
    depth = 0
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any, **options: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            found = parse(self, *given, **options)
        finally:
            depth -= 1
        if depth:  # of a subcommand
            return found
        raise CommandLineRead(*found[1])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restores the hook that install_abort_hook wraps
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    if program.endswith(".py"):
        monkeypatch.syspath_prepend(Path(program).parent)
        start = partial(runpy.run_path, program, run_name="__main__")
    else:
        is_package = importlib.util.find_spec(program).submodule_search_locations is not None
        start = importlib.import_module(f"{program}.__main__" if is_package else program).main
    with pytest.raises(CommandLineRead) as end:
        start()
    return list(end.value.args)


def check_pip(arguments: list[str]) -> None:
    """Check files and extras that ``pip install`` names, and its options."""
    from pip._internal.commands import create_command

    assert arguments.pop(0) == "install"
    options, packages = create_command("install").parse_args(arguments)
    assert all((PROJECT / name).is_file() for name in options.constraints)
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in [*packages, *options.editables]:
        named = re.fullmatch(r"(?:\.|mpicomp)\[(.*)\]", requirement)
        assert set(named[1].split(",") if named else ()) <= extras.keys(), requirement


def check_make(arguments: list[str]) -> None:
    """Check targets and variables of the Makefile."""
    text = (PROJECT / "Makefile").read_text()
    for argument in arguments:
        name, assigned, _ = argument.partition("=")
        assert re.search(rf"^{name} \?=" if assigned else rf"^{name}:", text, re.MULTILINE), argument


def check_pytest(arguments: list[str]) -> None:
    """Check paths and options of pytest."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-k":
            next(rest)
        elif argument not in ("-q", "-x"):
            assert (PROJECT / argument).exists(), argument


def check(words: list[str], document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one command."""
    program, *arguments = words
    if program in ("python", ".venv/bin/python", "mpicomp"):
        program, *arguments = [program, *arguments] if program == "mpicomp" else arguments
        if program == "-m":
            program, *arguments = arguments
        if program == "pytest":
            check_pytest(arguments)
        elif program == "mpicomp":
            assert read("mpicomp.cli.main", arguments, monkeypatch) == []
        elif "/" in program or not program.endswith(".py"):  # the others are programs of the reader's
            own, _, behind = shlex.join(arguments).partition(" -- ")
            rest = read(program, shlex.split(own), monkeypatch)
            if program == "tests/run_lanes.py":  # which passes them on to pytest
                check_pytest(rest)
            else:
                assert rest == []
            if behind:
                check(shlex.split(behind), document, monkeypatch)
    elif program == "pip":
        check_pip(arguments)
    elif program == "make":
        check_make(arguments)
    elif program in ("source", "."):
        assert (PROJECT / arguments[0]).is_file(), arguments[0]
    elif "/" in program:
        assert (PROJECT / program).is_file(), program
    else:
        assert program in NOT_RUN, f"{program}: say in NOT_RUN why it is not checked, or check it"
    if program == "sbatch":
        (script,) = (argument for argument in arguments if argument.endswith(".sbatch"))
        assert (PROJECT / script).is_file() or (PROJECT / "slurm" / script).is_file(), script  # or a copy of it


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def test_every_block_has_a_language_that_is_checked() -> None:
    known = RUN | SHELL | OUTPUT | PARSED.keys()
    assert {(page.name, language) for page, language, _ in DOCUMENTED if language not in known} == set()


@documents
def test_no_block_of_python_escapes_the_tests_that_run_it(document: Path) -> None:
    for language in sorted(RUN):
        found = [code for page, kind, code in DOCUMENTED if page == document and kind == language]
        assert found == blocks(document, language)


def test_a_block_without_a_language_is_output_and_no_command() -> None:
    programs = ("python", ".venv/bin/python", "mpicomp", "mpirun", "sudo", "pip", "make", "sbatch", "srun", "source")
    first = [(page.name, code.split(maxsplit=1)[0]) for page, language, code in DOCUMENTED if not language]
    assert [(page, word) for page, word in first if word in programs] == []


def test_blocks_of_configuration_can_be_read() -> None:
    for _, language, code in DOCUMENTED:
        if language in PARSED:
            PARSED[language](code)


@documents
def test_the_shell_can_read_every_command(document: Path) -> None:
    for page, language, code in DOCUMENTED:
        if page == document and language in SHELL:
            done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


@documents
def test_programs_take_the_arguments_of_every_command(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    for words in shell_commands(document):
        command = started(list(words))
        if command:
            with monkeypatch.context() as patch:
                check(command, document, patch)
