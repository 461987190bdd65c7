"""Lines that ranks write: each is read once, when it has its end."""

from __future__ import annotations

from pathlib import Path

from apps.chaos.lines import LineReader, Lines


def test_lines_are_read_once_and_only_whole(tmp_path: Path) -> None:
    Lines(tmp_path / "rank-3.jsonl").write("start", pid=17)
    with (tmp_path / "rank-3.jsonl").open("a") as file:
        file.write('{"kind": "st')
        file.flush()
        reader = LineReader(tmp_path)
        assert [(rank, row["kind"]) for rank, row in reader.read()] == [(3, "start")]
        assert (reader.read(), reader.processes) == ([], {3: 17})
        file.write('ep"}\n')
    assert reader.read() == [(3, {"kind": "step"})]
