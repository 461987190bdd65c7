"""The picture of the imports in docs/images is that of the source tree, and its arrows point down."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import pairwise
from types import ModuleType

import pytest

from tests.documents import PROJECT, inline_code, tables

SCRIPT = PROJECT / "docs" / "draw_imports.py"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_imports", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_has_the_imports_of_the_source_tree() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_check_names_what_was_added_and_what_is_gone(drawing: ModuleType) -> None:
    old, new = {"a": ["b", "c"], "b": [], "c": []}, {"a": ["b"], "b": ["c"], "c": []}
    svg = drawing.draw({name: set(below) for name, below in old.items()})
    assert drawing.drawn_graph(svg) == old
    assert drawing.difference(drawing.drawn_graph(svg), new) == ["- a -> c", "+ b -> c"]
    assert json.loads(json.dumps(drawing.drawn_graph(svg))) == old


def test_every_package_has_a_box_and_a_role(drawing: ModuleType) -> None:
    ours = {name for name in drawing.read_graph() if name not in drawing.LIBRARIES.values()}
    assert ours == drawing.ROLES.keys()


def test_the_table_of_packages_is_that_of_the_picture_and_names_files_that_exist(drawing: ModuleType) -> None:
    table = tables(PROJECT / "docs" / "architecture.md")["folder"]
    folders = [PROJECT / path for row in table for path in inline_code(row[0])]
    assert {".".join(path.relative_to(PROJECT).with_suffix("").parts) for path in folders} == drawing.ROLES.keys()
    files = [folder / name for folder, row in zip(folders, table, strict=True) for name in inline_code(row[2])]
    assert [path for path in files if not path.is_file()] == []


def test_arrows_point_down_and_boxes_of_a_row_do_not_touch(drawing: ModuleType) -> None:
    layout = drawing.Layout(drawing.reduced(drawing.read_graph()))
    row = {name: number for number, names in enumerate(layout.rows) for name in names}
    for path in layout.paths.values():
        assert [row[name] for name in path] == [*range(row[path[0]], row[path[-1]] + 1)]
    for names in layout.rows:
        for one, other in pairwise(names):
            apart = (drawing.width(one) + drawing.width(other)) / 2
            assert layout.x[other] - layout.x[one] > apart


def test_an_arrow_is_left_out_where_a_chain_of_arrows_replaces_it(drawing: ModuleType) -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert drawing.reduced(graph) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}
