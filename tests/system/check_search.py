"""Ask the search of the built site what newcomers ask: ``make site``.

``python tests/system/check_search.py SITE`` ranks the pages for each question as the site's search does, and fails
where no page that answers it is among the first. It needs the standard library alone, as the site's environment has
little more. The ranking is that of lunr.js (BM25 with boosts, and each word as the beginning of one) and of Material's
worker, which prefers whole pages and matches of every word.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FIRST = 5
"""Results that somebody reads."""
QUESTIONS: dict[str, tuple[str, ...]] = {
    "GPU nodes": ("gpu-nodes",),
    "several GPUs Ethernet": ("gpu-nodes",),
    "nanoGPT": ("gpu-nodes",),
    "torch.compile": ("pytorch", "torch-backend"),
    "Slurm Apptainer": ("clusters", "slurm"),
    "cost of fine-tuning": ("fine-tuning",),
    "LoRA": ("fine-tuning",),
    "resume": ("checkpoints",),
    "bytes sent": ("watching",),
    "what it sends": ("watching",),
    "wandb": ("watching",),
    "W&B": ("watching",),
    "jupyter notebook": ("notebooks",),
    "which method": ("choose",),
    "loss is worse": ("worse-loss",),
    "several nodes without root": ("clusters",),
    "gradient accumulation": ("pytorch",),
    "profiler": ("torch-backend", "traces"),
    "emulator": ("local",),
    "uninstall": ("quickstart",),
}
"""Words of a question, and the pages of which one answers it."""
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    a able about across after all almost also am among an and any are as at be because been but by can cannot
    could dear did do does either else ever every for from get got had has have he her hers him his how however
    i if in into is it its just least let like likely may me might most must my neither no nor not of off often
    on only or other our own rather said say says she should since so some than that the their them then there
    these they this tis to too twas us wants was we were what when where which while who whom why will with
    would yet you your
    """,
    )
)
"""Words that lunr leaves out."""
_B, _K1 = 0.75, 1.2  # lunr's parameters of BM25


class Search:
    """Index of a site's sections, as ``search/search_index.json`` describes them."""

    def __init__(self, index: dict[str, Any]) -> None:
        self._separator = re.compile(index["config"]["separator"])
        self._sections = {section["location"]: section for section in index["docs"]}
        boosts = {name: field["boost"] for name, field in index["config"]["fields"].items() if name != "tags"}
        self._weights: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        counts = {
            (place, field): Counter(self._words(section[field]))
            for place, section in self._sections.items()
            for field in boosts
        }
        rarity = self._rarity(counts)
        for field, boost in boosts.items():
            lengths = {place: counts[place, field].total() for place in self._sections}
            mean = sum(lengths.values()) / len(lengths) or 1.0
            for place, section in self._sections.items():
                for word, count in counts[place, field].items():
                    long = _K1 * (1 - _B + _B * lengths[place] / mean)
                    weight = rarity[word] * (_K1 + 1) * count / (long + count)
                    self._weights[word][place] += weight * boost * section.get("boost", 1)

    def pages(self, question: str) -> list[str]:
        """Return the pages that match any word of a question, the best first."""
        scores: dict[str, float] = defaultdict(float)
        matched: dict[str, set[str]] = defaultdict(set)
        terms = [*self._words(question)]
        for term in terms:
            for word in (word for word in self._weights if word.startswith(term)):
                for place, weight in self._weights[word].items():
                    scores[place] += weight
                    matched[place].add(term)
        for place in scores:
            whole = "#" not in place
            scores[place] *= 1 + (whole + len(matched[place]) / len(set(terms))) ** 2
        best: dict[str, float] = defaultdict(float)
        for place, score in scores.items():
            page = place.partition("#")[0]
            best[page] = max(best[page], score)
        return sorted(best, key=lambda page: -best[page])

    def _words(self, text: str) -> Iterator[str]:
        plain = re.sub(r"<[^>]*>", " ", text).lower()
        return (word for word in self._separator.split(plain) if word and word not in STOP_WORDS)

    def _rarity(self, counts: dict[tuple[str, str], Counter[str]]) -> dict[str, float]:
        """Return lunr's inverse document frequency of each word, which counts a section once for each field."""
        found = Counter(word for words in counts.values() for word in words)
        total = len(self._sections)
        return {word: math.log(1 + abs((total - n + 0.5) / (n + 0.5))) for word, n in found.items()}


def unanswered(search: Search) -> list[str]:
    """Return a line for each question whose pages are not among the first results."""
    lines = []
    for question, answers in QUESTIONS.items():
        first = search.pages(question)[:FIRST]
        if not {f"{answer}.html" for answer in answers} & {*first}:
            lines.append(f"{question!r}: expected {' or '.join(answers)}, found {', '.join(first) or 'nothing'}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Ask all questions; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("site", type=Path, help="folder of the built site")
    site = parser.parse_args(argv).site
    lines = unanswered(Search(json.loads((site / "search" / "search_index.json").read_text())))
    for line in lines:
        print(f"search: {line}", file=sys.stderr)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
