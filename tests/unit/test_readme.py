"""README and docs name existing things only: links, options, defaults, names, error messages."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

import collectives
import mpicomp
from apps.figures import demo_comparison
from apps.train import options as train_options
from collectives.consistency import recursive_doubling
from collectives.dense import allreduce as sums
from collectives.group import routes
from mpicomp.cli import bench
from mpicomp.cli.bench import BenchRequest
from mpicomp.torch import DistributedOptimizer, OneBitAdam
from tests.documents import (
    DOCUMENTS,
    PROJECT,
    anchors,
    blocks,
    commands,
    inline_code,
    links,
    pieces,
    prose,
    rows,
    tables,
)

README, DOCS = PROJECT / "README.md", PROJECT / "docs"
TRAINING, METHODS = DOCS / "training.md", DOCS / "choose.md"
ERRORS = [*sorted(DOCS.glob("errors*.md")), TRAINING, DOCS / "checkpoints.md"]
BENCH, TOPOLOGIES, RECORDS = DOCS / "commands.md", DOCS / "tuning.md", DOCS / "records.md"
MIGRATING, HOROVOD = DOCS / "migrating.md", DOCS / "migrating-horovod.md"

# How a command names a program, and the file that declares its options.
SOURCED = "source slurm/env.sh"
PROGRAMS = {
    "mpicomp bench": "mpicomp/cli/bench/options.py",
    "mpicomp demo": "mpicomp/cli/demo/__init__.py",
    "mpicomp doctor": "mpicomp/cli/doctor/__init__.py",
    "mpicomp advise": "mpicomp/cli/advise/__init__.py",
    "mpicomp trace": "mpicomp/cli/trace.py",
    "mpicomp analyze": "mpicomp/cli/analyze.py",
    "mpicomp run": "mpicomp/cli/run/start.py",
    "mpicomp completion": "mpicomp/cli/completion.py",
    "mpicomp --version": "mpicomp/cli/main.py",
    "python -m apps.train": "apps/train/options.py",
    "python -m apps.train.plot": "apps/train/plot.py",
    "python -m apps.emulator": "apps/emulator/__main__.py",
    "python -m apps.reproduce": "apps/reproduce/__main__.py",
    "python -m apps.figures": "apps/figures.py",
    "python -m apps.chaos": "apps/chaos/__main__.py",
    "python -m apps.fuzz": "apps/fuzz/__main__.py",
    "python -m apps.performance.damaged_messages": "apps/performance/damaged_messages.py",
    "python -m apps.finetune": "apps/finetune/__main__.py",
    "python -m apps.pipeline": "apps/pipeline/options.py",
    "python -m apps.pipeline.split": "apps/pipeline/split/options.py",
    "python -m apps.scale": "apps/scale/__main__.py",
    "python -m apps.performance.step_path": "apps/performance/step_path.py",
    "python -m apps.performance.run_all": "apps/performance/run_all.py",
    "python -m apps.performance.cluster": "apps/performance/cluster/__main__.py",
    "python tests/run_lanes.py": "tests/run_lanes.py",
    "python examples/run_all.py": "examples/run_all.py",
    "python examples/plain_loop.py": "examples/plain_loop.py",
    "slurm/train.sbatch": "apps/train/options.py",
    "slurm/bench.sbatch": "mpicomp/cli/bench/options.py",
}
# Options of mpirun, pip, scancel and the like.
FOREIGN = {
    "--allow-run-as-root", "--batch", "--bind-to", "--build-arg", "--cpus-per-task", "--directory", "--editable",
    "--gpus-per-node", "--help", "--map-by", "--mca", "--nodes", "--ntasks-per-node", "--oversubscribe", "--path",
    "--prtemca", "--recipe", "--repository", "--requeue", "--shm-size", "--sign", "--signal", "--strict", "--with-ft",
}  # fmt: skip

# Most words of a page that people read from top to bottom, and the pages that are looked up or for developers.
MOST_WORDS = 1500
LONG = {"performance-tables.md", "reproduce.md", "architecture.md"}
PAGES = [page for page in sorted(DOCS.glob("*.md")) if page.name not in LONG]

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def declared(program: str) -> set[str]:
    found = set(re.findall(r'"(--[a-z-]+)"', (PROJECT / PROGRAMS[program]).read_text()))
    return found | ({"--no-check"} if "--check" in found else set())


def calls(document: Path) -> Iterator[tuple[str, list[str]]]:
    """Program and arguments of every command that starts one of ours."""
    for line in commands(document):
        for program in PROGRAMS:
            before, found, arguments = line.partition(program)
            if found and (not before or before.endswith(" ")) and arguments[:1] in ("", " "):
                words = shlex.split(arguments.partition(" -- ")[0])
                # options after the program that `mpicomp run` starts are the program's
                own = takewhile(lambda word: word != "-m" and not word.endswith(".py"), words)
                yield program, list(own) if program == "mpicomp run" else words


@documents
def test_relative_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


@documents
def test_commands_use_options_that_exist_and_can_be_parsed(document: Path) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    for program, arguments in calls(document):
        ours = {argument for argument in arguments if argument.startswith("--")}
        assert ours <= declared(program), f"{document.name}: {program} {shlex.join(arguments)}"
        if PROGRAMS[program] == "apps/train/options.py":
            train_options.parse(arguments)
        elif PROGRAMS[program] == PROGRAMS["mpicomp bench"]:
            BenchRequest.parse(parser.parse_args(arguments))


def test_pages_that_programs_name_exist() -> None:
    for folder in ("collectives", "mpicomp", "apps", "examples", "slurm"):
        for path in (PROJECT / folder).rglob("*"):
            if path.suffix in {".py", ".sh", ".sbatch"}:
                for name in re.findall(r"\bdocs/[\w-]+\.md\b", path.read_text()):
                    assert (PROJECT / name).exists(), f"{path}: {name}"


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_pages_of_the_docs_are_read_in_a_few_minutes(document: Path) -> None:
    written = re.sub(r"<!-- begin (\S+) -->.*?<!-- end \1 -->", "", prose(document), flags=re.DOTALL)
    words = [word for word in written.split() if re.search(r"\w", word)]  # no code, borders and tables of programs
    assert len(words) <= MOST_WORDS, f"{document.name} has {len(words)} words: shorten or split it"


def test_the_readme_is_short_and_begins_with_its_gain_and_the_conditions() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    first_screen = " ".join(lines[2:18])
    for part in ("100 Mbit/s", "10 Gbit/s", "with local steps", "Four [emulated]", "is slower than dense"):
        assert part in first_screen, part
    assert "".join(lines).count("  # new") == 5
    assert f"mpicomp demo\n# {demo_comparison().finding()}.\n" in README.read_text()
    pictures = [link for link in links(README) if link.endswith((".png", ".svg"))]
    assert pictures == ["docs/images/badges.svg", "docs/figures/frontier-gpt.png", "docs/figures/demo.png"]


def test_pages_agree_on_the_lines_that_change_in_a_loop() -> None:
    for document in (README, DOCS / "faq.md", DOCS / "quickstart.md"):
        assert "two imports and three lines" in " ".join(document.read_text().lower().split()), document.name


def test_the_readme_says_before_its_loop_with_pytorch_where_models_may_be() -> None:
    for document, part in ((README, "## PyTorch"), (DOCS / "quickstart.md", "## PyTorch")):
        text = " ".join(document.read_text().partition(part)[2][:400].split())
        assert re.search(r"Models .*may be on .*\[GPUs\]", text)


def test_commands_of_the_readme_that_start_ranks_come_after_the_environment_that_lets_them_share_cores() -> None:
    for block in blocks(README, "sh"):
        assert "mpirun" not in block.partition(SOURCED)[0], block


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("document", "page", "name"),
    [(README, README, "loop.py"), (MIGRATING, HOROVOD, "train.py")],
    ids=["readme", "migrating"],
)
def test_the_first_program_of_a_page_starts_on_a_machine_with_two_cores(
    document: Path, page: Path, name: str, tmp_path: Path
) -> None:
    (start,) = (block for block in blocks(document, "sh") if name in block)
    program = next(piece for piece in pieces(page) if isinstance(piece, str))
    (tmp_path / name).write_text(program)
    (tmp_path / "slurm").symlink_to(PROJECT / "slurm")
    settings = ("OMPI_", "PRTE_", "MPICOMP_", "SLURM_")  # of the shell that runs this test
    clean = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"  # for pages that start `mpicomp run` without slurm/env.sh
    env = clean | {"MPICOMP_VENV": sys.prefix, "PYTHONPATH": str(PROJECT), "PATH": path}
    two = sorted(os.sched_getaffinity(0))[:2]
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, two)), "bash", "-ec", start],
        cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@documents
def test_targets_of_make_and_files_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (PROJECT / "Makefile").read_text(), re.MULTILINE), target
    for name in re.findall(r"\b(?:slurm|tests|collectives|mpicomp|apps|examples)/[\w/]+\.(?:py|sh|sbatch)\b", text):
        assert (PROJECT / name).exists(), name


@documents
def test_options_in_the_text_exist(document: Path) -> None:
    known = FOREIGN.union(*map(declared, PROGRAMS))
    named = {option for code in inline_code(prose(document)) for option in re.findall(r"(?<!\S)--[a-z-]+", code)}
    assert named <= known


@pytest.mark.parametrize(
    ("program", "document"),
    [
        ("mpicomp bench", BENCH),
        ("mpicomp demo", DOCS / "examples.md"),
        ("mpicomp doctor", DOCS / "quickstart.md"),
        ("mpicomp trace", DOCS / "traces.md"),
        ("mpicomp analyze", DOCS / "traces.md"),
        ("mpicomp run", DOCS / "run.md"),
        ("python -m apps.train", TRAINING),
        ("python -m apps.train.plot", TRAINING),
        ("python -m apps.emulator", DOCS / "local.md"),
        ("python -m apps.figures", PROJECT / "CONTRIBUTING.md"),
        ("python -m apps.performance.cluster", DOCS / "performance-tables.md"),
        ("python -m apps.pipeline.split", DOCS / "split-learning.md"),
    ],
)
def test_every_option_is_described(program: str, document: Path) -> None:
    text = document.read_text()
    assert not [option for option in declared(program) if not re.search(rf"{option}(?![a-z-])", text)]


def test_defaults_of_the_command_lines_are_as_described() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    for document, program, defaults in (
        (BENCH, "mpicomp bench", parser.parse_args([])),
        (TRAINING, "python -m apps.train", train_options.parse([])),
    ):
        cells = {row[0].strip("`"): row[1].strip("`") for row in rows(document) if row[1].startswith("`")}
        described = {option: cells[option] for option in cells.keys() & declared(program)}
        assert len(described) > 5
        for option, value in described.items():
            name = "algorithm" if option == "--method" else option[2:].replace("-", "_")
            assert str(getattr(defaults, name)) == value, option


@pytest.mark.parametrize("name", mpicomp.ALGORITHMS)
def test_the_page_that_the_methods_link_to_describes_each_with_its_options_and_defaults(name: str) -> None:
    (page,) = re.findall(rf"^\| \[`{name}`\]\(([^)#\s]+)[^)]*\)", METHODS.read_text(), re.MULTILINE) or ["contrib.md"]
    described = [row[:2] for row in rows(DOCS / page)]
    for field in dataclasses.fields(mpicomp.ALGORITHMS[name]):
        assert [f"`{field.name}`", f"`{field.default!r}`"] in described, field.name


def test_all_methods_but_young_ones_are_in_the_table() -> None:
    cells = [row[0] for row in rows(METHODS)]
    for name, kind in mpicomp.ALGORITHMS.items():
        assert kind.__module__.startswith("mpicomp.contrib.") or any(
            cell.startswith(f"[`{name}`](") for cell in cells
        ), name


def test_the_readme_has_five_methods_and_the_number_of_all() -> None:
    named = [row[0] for row in rows(README) if row[0].startswith("[`")]
    assert len(named) == 5
    in_table = [name for name in mpicomp.ALGORITHMS if f"| [`{name}`](" in METHODS.read_text()]
    assert f"[{len(in_table)} methods in all](docs/choose.md#all-methods)" in README.read_text()


def test_the_page_of_gpus_names_the_methods_that_do_not_encode_there() -> None:
    (row,) = (line for line in (DOCS / "gpu.md").read_text().splitlines() if line.startswith("| methods |"))
    kinds = [kind for kind in mpicomp.ALGORITHMS.values() if not kind.__module__.startswith("mpicomp.contrib.")]
    elsewhere = {kind.__name__ for kind in kinds if not kind().encodes_on_devices("bfloat16")}
    assert elsewhere == {"Dense", "EFSignSGD", "PowerSGD", "SparseLoCo"}
    assert elsewhere <= set(inline_code(row))


def test_all_topologies_are_named() -> None:
    cells = [row[0] for row in rows(TOPOLOGIES)]
    for name in (*collectives.TOPOLOGIES, "auto", "mpi"):
        assert f"`{name}`" in cells


def test_thresholds_of_auto_are_those_of_the_code() -> None:
    limits = {row[2]: re.findall(r"\d+ [KM]iB", row[1]) for row in tables(TOPOLOGIES)["payload"]}
    within, between = recursive_doubling.MOST_BYTES_IN_A_NODE >> 10, recursive_doubling.MOST_BYTES_BETWEEN_NODES >> 10
    assert [f"{within} KiB", f"{between} KiB"] in limits.values()
    a_rank, altogether = sums.RING_BYTES_A_RANK >> 10, sums.RING_BYTES >> 20
    assert limits["MPI's own all-reduce"] == [f"{a_rank} KiB", f"{altogether} MiB"]
    assert limits["halving-doubling"] == [f"{routes.LATENCY_BYTES >> 10} KiB"]


def literals() -> list[str]:
    """All texts in the sources, with a blank where a value is filled in."""
    found = []
    for package in ("collectives", "mpicomp", "apps"):
        for path in (PROJECT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else " " for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.parametrize(
    ("pages", "owner"),
    [
        (["one-bit-adam.md"], OneBitAdam),
        (["quickstart.md"], mpicomp.Communicator),
        (["pytorch.md", "local-steps.md"], DistributedOptimizer),
        (["per-node.md"], mpicomp.PerNode),
    ],
    ids=lambda found: getattr(found, "__name__", ""),
)
def test_pages_have_all_options_with_their_defaults(pages: list[str], owner: type) -> None:
    described: dict[str, str] = {}
    for row in (row for page in pages for row in rows(DOCS / page)):
        for name, value in zip(inline_code(row[0]), inline_code(row[1]), strict=False):
            described.setdefault(name, value)
    for option in inspect.signature(owner).parameters.values():
        if option.default is not option.empty:
            assert ast.literal_eval(described[option.name]) == option.default, option.name


def test_error_messages_are_those_of_the_code() -> None:
    texts, found = literals(), [tables(page) for page in ERRORS]
    cells = "\n".join(
        row[0] for page in found for head in ("error", "message", "warning") for row in page.get(head, ())
    )
    messages = inline_code(cells)
    assert len(messages) > 50
    for message in messages:
        if message.isidentifier():
            assert hasattr(collectives, message), message
        else:
            pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), re.DOTALL)
            assert any(pattern.search(text) for text in texts), message


def test_every_error_of_collectives_is_described() -> None:
    kinds = {name: getattr(collectives, name) for name in collectives.__all__}
    errors = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert errors <= {code for page in ERRORS for code in inline_code(prose(page))}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("part", "command"),
    [
        ("`mpicomp bench`", ("mpicomp.cli.main", "bench", "--count", "100", "--repeats", "1")),
        ("`apps.train`", ("apps.train", "--epochs", "1", "--hidden", "4")),
    ],
    ids=["bench", "train"],
)
def test_every_field_of_the_json_lines_is_described(part: str, command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json", str(path)],
        cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fields = {field for line in path.read_text().splitlines() for field in json.loads(line)}
    described = prose(RECORDS).partition(f"## {part}\n")[2].partition("\n## ")[0]
    assert fields <= set(inline_code(described))
