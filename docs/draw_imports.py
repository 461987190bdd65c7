"""Draw which packages of `collectives` and `mpicomp` import which: docs/images/imports.svg.

    python docs/draw_imports.py            # writes the picture
    python docs/draw_imports.py --check    # exits with 1 if the picture lacks an import of the source tree

Packages are rows of boxes, and every arrow points down. An arrow is left out where a chain of other arrows leads from
one package to the other. The picture contains all imports as JSON, by which `--check` compares it with the source tree.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from graphlib import TopologicalSorter
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
PICTURE = PROJECT / "docs" / "images" / "imports.svg"
PACKAGES = ("collectives", "mpicomp")
LIBRARIES = {"mpi4py": "MPI (mpi4py)", "numba": "Numba, LLVM", "llvmlite": "Numba, LLVM"}
ROLES = {
    "collectives.arrays": "NumPy, DLPack, GPUs",
    "collectives.checksums": "of each message",
    "collectives.communicator": "Communicator",
    "collectives.consistency": "do calls agree?",
    "collectives.cost": "time on a network",
    "collectives.dense": "sums, gathered rows",
    "collectives.emulation": "slow links",
    "collectives.execution": "calls, executors",
    "collectives.group": "ranks, order of calls",
    "collectives.nodes": "which ranks share memory",
    "collectives.progress": "waiting, limits",
    "collectives.recovery": "survivors regroup",
    "collectives.schedules": "plans: ring, torus, ...",
    "collectives.threads": "run_local",
    "collectives.trace": "events, clocks",
    "mpicomp.aggregator": "Algorithm, Aggregator",
    "mpicomp.algorithms": "Marsit, QSGD, ...",
    "mpicomp.auto": "dense or compressed?",
    "mpicomp.cli": "bench, doctor, advise",
    "mpicomp.codecs": "values to bytes",
    "mpicomp.contrib": "EF21, SSDM, ...",
    "mpicomp.feedback": "residuals",
    "mpicomp.kernels": "compiled loops",
    "mpicomp.layers": "staging, widening",
    "mpicomp.manual": "pages of help",
    "mpicomp.nodes": "two levels",
    "mpicomp.pipeline": "stages, stores",
    "mpicomp.recovery": "steps among ranks that die",
    "mpicomp.reducers": "routes of payloads",
    "mpicomp.spaces": "memory, host and GPU",
    "mpicomp.state": "checks, files, other ranks",
    "mpicomp.torch": "optimizers, DDP",
}
COLORS = {"collectives": "#dbeafe", "mpicomp": "#ffedd5"}  # libraries are grey
BOX_WIDTH, BOX_HEIGHT, GAP, ROW_HEIGHT, MARGIN = 190, 42, 18, 74, 16
SWEEPS, SMOOTHING = 40, 400

Graph = dict[str, set[str]]


# Reading --------------------------------------------------------------------------------------------------------------


class Import(NamedTuple):
    """An imported module, the name that is taken from it or "", and the name that the importing module gives to it."""

    module: str
    name: str
    given: str
    for_types: bool


def find(module: str) -> Path | None:
    """Return the file of a module or package, or None if it is neither."""
    path = PROJECT / Path(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Return the imports of a module, also those in functions and those for type checkers alone."""
    file, found = find(module), []
    assert file is not None
    tree = ast.parse(file.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        for_types = id(node) in guarded
        if isinstance(node, ast.Import):
            found += [Import(alias.name, "", alias.name, for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [Import(node.module, one.name, one.asname or one.name, for_types) for one in node.names]
    return tuple(found)


def home(module: str, name: str) -> str:
    """Return the module that an import reaches: names that a package exports lead to the module that defines them."""
    if not name or find(module) is None:
        return module
    if find(f"{module}.{name}"):
        return f"{module}.{name}"
    return next((home(one.module, one.name) for one in imports(module) if one.given == name and one.name), module)


def box_of(module: str) -> str:
    """Return the package or library whose box a module belongs to, or "" without a box."""
    root, _, inner = module.partition(".")
    if root not in PACKAGES:
        return LIBRARIES.get(root, "")
    box = f"{root}.{inner.split('.')[0]}"
    is_package = inner and (PROJECT / Path(*box.split("."), "__init__.py")).is_file()
    return box if is_package or box in ROLES else ""


def reachable(graph: Graph, start: str) -> set[str]:
    """Return the boxes that arrows lead to from one, over one arrow or more."""
    found: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        box = ahead.pop()
        if box not in found:
            found.add(box)
            ahead += graph[box]
    return found


def read_graph() -> Graph:
    """Return the boxes that each box imports. Modules at the top of `collectives` and `mpicomp` have no box."""
    graph: Graph = {name: set() for name in LIBRARIES.values()}
    for_types = set()
    for package in PACKAGES:
        for file in sorted((PROJECT / package).rglob("*.py")):
            module = ".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")
            box = box_of(module)
            if not box:
                continue
            graph.setdefault(box, set())
            for one in imports(module):
                below = box_of(home(one.module, one.name))
                if below not in ("", box):
                    for_types.add((box, below)) if one.for_types else graph[box].add(below)
    for box, below in sorted(for_types):
        if box not in reachable(graph, below):  # an annotation may name a class of a package above
            graph[box].add(below)
    return graph


# Layout ---------------------------------------------------------------------------------------------------------------


def reduced(graph: Graph) -> Graph:
    """Return the arrows to draw: those that no chain of other arrows replaces."""
    return {
        box: {one for one in below if not any(one in reachable(graph, other) for other in below - {one})}
        for box, below in graph.items()
    }


def row_of_each(graph: Graph) -> dict[str, int]:
    """Return the row of each box, counted from the top: one below the lowest box that imports it; libraries last."""
    rows = dict.fromkeys(graph, 0)
    for box in reversed([*TopologicalSorter(graph).static_order()]):
        for one in graph[box]:
            rows[one] = max(rows[one], rows[box] + 1)
    last = max(rows.values())
    return rows | dict.fromkeys(LIBRARIES.values(), last)


class Layout:
    """Places of boxes, and of the points where arrows cross rows.

    Attributes
    ----------
    rows : list of list of str
        Boxes and crossing points from left to right, row by row; a crossing point is named after its arrow and row.
    paths : dict of (str, str) to list of str
        Names along each arrow, from the importing box down.
    x : dict of str to float
        Centres, in pixels.
    """

    def __init__(self, graph: Graph) -> None:
        self.row = row_of_each(graph)
        self.paths: dict[tuple[str, str], list[str]] = {}
        self.rows: list[list[str]] = [[] for _ in range(max(self.row.values()) + 1)]
        for box in sorted(graph):
            self.rows[self.row[box]].append(box)
        for box, below in sorted(graph.items()):
            for one in sorted(below):
                crossings = {f"{box} > {one} @ {row}": row for row in range(self.row[box] + 1, self.row[one])}
                for name, row in crossings.items():
                    self.rows[row].append(name)
                self.paths[box, one] = [box, *crossings, one]
        self._neighbours: dict[str, list[list[str]]] = {name: [[], []] for row in self.rows for name in row}
        for path in self.paths.values():
            for above, below_it in pairwise(path):
                self._neighbours[below_it][0].append(above)
                self._neighbours[above][1].append(below_it)
        self._order()
        self.x = self._centres()

    def _order(self) -> None:
        """Sort each row by the mean position of the neighbours in the row above or below, and keep the best order."""
        best, fewest = [*map(list, self.rows)], self._crossings()
        for sweep in range(SWEEPS):
            side = sweep % 2  # 0: downwards, by the row above
            for row in self.rows if side == 0 else reversed(self.rows):
                position = {name: i for names in self.rows for i, name in enumerate(names)}
                at = {
                    name: sum(position[other] for other in others) / len(others) if others else position[name]
                    for name in row
                    for others in [self._neighbours[name][side]]
                }
                row.sort(key=lambda name: (at[name], name))
            self._swap()
            if (crossings := self._crossings()) < fewest:
                best, fewest = [*map(list, self.rows)], crossings
        self.rows = best

    def _swap(self) -> None:
        """Exchange neighbours in a row as long as that saves crossings."""
        for row in self.rows:
            for i in range(len(row) - 1):
                before = self._crossings()
                row[i], row[i + 1] = row[i + 1], row[i]
                if self._crossings() >= before:
                    row[i], row[i + 1] = row[i + 1], row[i]

    def _crossings(self) -> int:
        position = {name: i for names in self.rows for i, name in enumerate(names)}
        count = 0
        for names in self.rows:
            ends = [(i, position[below]) for i, name in enumerate(names) for below in self._neighbours[name][1]]
            count += sum((a - c) * (b - d) < 0 for n, (a, b) in enumerate(ends) for c, d in ends[:n])
        return count

    def _centres(self) -> dict[str, float]:
        """Return x of each name: near the mean of its neighbours, without overlaps in its row."""
        x: dict[str, float] = {name: i * (BOX_WIDTH + GAP) for names in self.rows for i, name in enumerate(names)}
        for sweep in range(SMOOTHING):
            for names in self.rows if sweep % 2 else reversed(self.rows):
                wanted = []
                for name in names:
                    near = [x[other] for side in self._neighbours[name] for other in side]
                    wanted.append(sum(near) / len(near) if near else x[name])
                x |= dict(zip(names, spread(names, wanted), strict=True))
        left = min(value - width(name) / 2 for name, value in x.items())
        return {name: value - left + MARGIN for name, value in x.items()}


def width(name: str) -> float:
    """Return the width of a box, or of the space that a crossing arrow keeps."""
    return GAP if "@" in name else BOX_WIDTH


def spread(names: Sequence[str], wanted: Sequence[float]) -> list[float]:
    """Return centres in the given order, as near to the wanted ones as the widths allow (in the least squares)."""
    # pool adjacent violators: boxes that would overlap become a block that moves as a whole
    offsets = [0.0]
    for one, other in pairwise(names):
        offsets.append(offsets[-1] + (width(one) + width(other)) / 2 + GAP)
    blocks: list[list[float]] = []  # sum, count
    for want, offset in zip(wanted, offsets, strict=True):
        blocks.append([want - offset, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    starts = [total / count for total, count in blocks for _ in range(int(count))]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


# Drawing --------------------------------------------------------------------------------------------------------------


def draw(graph: Graph) -> str:
    """Return the picture as SVG."""
    layout = Layout(reduced(graph))
    right = max(x + width(name) / 2 for name, x in layout.x.items()) + MARGIN
    bottom = len(layout.rows) * ROW_HEIGHT - (ROW_HEIGHT - BOX_HEIGHT) + 2 * MARGIN
    style = 'fill="none" stroke="#64748b" marker-end="url(#head)"'
    shapes = [f'<path d="{curve(layout, path)}" {style}/>' for path in layout.paths.values()]
    for number, names in enumerate(layout.rows):
        for name in names:
            if "@" not in name:
                shapes += box(name, layout.x[name], MARGIN + number * ROW_HEIGHT)
    lines = (f"{json.dumps(name)}: {json.dumps(sorted(below))}" for name, below in sorted(graph.items()))
    data = "{\n" + ",\n".join(lines) + "\n}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{right:.0f}" height="{bottom}" font-family="sans-serif">
<title>Imports among the packages of collectives and mpicomp</title>
<metadata id="imports">{escape(data, quote=False)}</metadata>
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 0L8 4L0 8z" fill="#64748b"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>
{chr(10).join(shapes)}
</svg>
"""


def curve(layout: Layout, path: Sequence[str]) -> str:
    """Return the path of an arrow: vertical where it leaves and meets boxes and crosses rows."""
    places = []
    for name in path:
        number = next(i for i, names in enumerate(layout.rows) if name in names)
        top = MARGIN + number * ROW_HEIGHT
        x = layout.x[name]
        places += [(x, top), (x, top + BOX_HEIGHT)]
    places = places[1:-1]
    text = f"M{places[0][0]:.0f} {places[0][1]}"
    for (x, y), (to_x, to_y) in pairwise(places):
        middle = (y + to_y) / 2
        text += (
            f"L{to_x:.0f} {to_y}" if x == to_x else f"C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y}"
        )
    return text


def box(name: str, x: float, top: float) -> list[str]:
    """Return a rectangle with the name of a package and its role."""
    left, color = x - BOX_WIDTH / 2, COLORS.get(name.split(".")[0], "#e2e8f0")
    role = ROLES.get(name)
    shapes = [
        f'<rect x="{left:.0f}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{color}" '
        'stroke="#475569"/>',
        f'<text x="{x:.0f}" y="{top + (18 if role else 26)}" text-anchor="middle" font-size="12.5" '
        f'font-weight="bold">{escape(name)}</text>',
    ]
    if role:
        shapes.append(f'<text x="{x:.0f}" y="{top + 34}" text-anchor="middle" font-size="11">{escape(role)}</text>')
    return shapes


def drawn_graph(svg: str) -> dict[str, list[str]]:
    """Return the imports that a picture contains."""
    found = re.search(r'<metadata id="imports">(.*?)</metadata>', svg, re.DOTALL)
    return json.loads(unescape(found[1])) if found else {}


def difference(old: Mapping[str, Iterable[str]], new: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a line for each import that one of two graphs lacks."""
    before, after = ({(box, one) for box, below in graph.items() for one in below} for graph in (old, new))
    return [f"{'+' if edge in after else '-'} {edge[0]} -> {edge[1]}" for edge in sorted(before ^ after)]


def main() -> None:
    """Write the picture, or check that it is up to date."""
    parser = argparse.ArgumentParser(description="Draw which packages import which.")
    parser.add_argument("--check", action="store_true", help="compare the picture with the source tree; write nothing")
    arguments, graph = parser.parse_args(), read_graph()
    if not arguments.check:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(draw(graph))
    elif changed := difference(drawn_graph(PICTURE.read_text()), graph):
        sys.exit("\n".join([f"{PICTURE.name} is not up to date: run python docs/draw_imports.py", *changed]))


if __name__ == "__main__":
    main()
