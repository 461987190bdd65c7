"""Results are kept, and runs that know nothing of each other are made at the same time."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from apps.records import Record
from apps.reproduce.__main__ import main
from apps.studies.parallel import run_seeds
from apps.studies.results import Results, slug


def test_what_is_done_is_not_done_again_unless_settings_differ(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"found": len(made)}

    assert Results(tmp_path).get("a", {"n": (1, 2)}, make) == {"found": 1}
    assert Results(tmp_path).get("a", {"n": [1, 2]}, make) == {"found": 1}
    assert Results(tmp_path).get("a", {"n": [1, 3]}, make) == {"found": 2}
    assert Results(tmp_path, fresh=True).get("a", {"n": [1, 3]}, make) == {"found": 3}
    assert Results(tmp_path).seconds() >= 0


def test_a_fresh_result_that_several_parts_ask_for_is_made_once(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"found": len(made)}

    Results(tmp_path).get("a", {}, make)
    fresh = Results(tmp_path, fresh=True)
    assert fresh.kept("a", {}) is None
    assert [fresh.get("a", {}, make) for _ in range(3)] == [{"found": 2}] * 3
    assert pickle.loads(pickle.dumps(fresh)).kept("a", {}) == {"found": 2}  # as a run in another process has it


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[]", r"it is \[\], not an object"),
        ('{"settings": {}, "result": {}}', "it has no 'seconds'"),
        ('{"settings": {}, "seconds": 1, "result": 2}', "its 'result' is 2, not an object"),
        ('{"settings": {}, "seconds": 1' + "0" * 400 + ', "result": {}}', "more than 18 digits"),
    ],
)
def test_a_file_of_another_program_is_one_error(
    tmp_path: Path, content: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "marsit").mkdir()
    path = tmp_path / "marsit" / "figure-1b-gaussian.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"^{path} is .*{cause}.*; remove it to measure again$"):
        Results(path.parent).get(path.stem, {}, dict)
    assert main(["marsit", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_runs_of_seeds_are_listed_by_name() -> None:
    def make(name: str, seed: int) -> partial[Record]:
        return partial(dict, name=name, seed=seed)

    wanted: Any = {name: [{"name": name, "seed": seed} for seed in range(2)] for name in "ab"}
    assert run_seeds("ab", 2, make) == wanted


def test_runs_of_a_method_with_a_slash_in_its_name_lie_with_the_others(tmp_path: Path) -> None:
    Results(tmp_path).get(f"{slug('0/1 Adam')}-0", {}, lambda: {"loss": 1.0})
    assert [path.name for path in tmp_path.glob("*.json")] == ["0-1-adam-0.json"]
