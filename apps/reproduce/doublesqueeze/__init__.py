"""DoubleSqueeze (Tang et al., ICML 2019): loss against epochs and against time, and the gain against bandwidth.

- `learning`: losses against epochs, trained by ranks that are threads
- `times`: bytes and times over MPI (the functions in `job` run on the ranks)
- `against_time`: losses against time, from both
"""

from __future__ import annotations

from pathlib import Path

from apps.reproduce.claims import Claim
from apps.reproduce.doublesqueeze import against_time, learning, times
from apps.studies.results import Results


def study(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Run all parts, of which the last needs the results of the others."""
    runs, rates = learning.learn(results, seeds, full)
    claims = [*learning.judge(runs, rates, full), *times.compare(results)]
    figures = learning.draw(runs, results.folder)
    step_s, taken = times.step_seconds(results), times.measured(results, full)
    if not isinstance(taken, str):
        lengths = (times.MODEL, times.LARGEST if full else times.RESNET_18)
        claims += against_time.judge(runs, taken, step_s, lengths)
        figures += against_time.draw(runs, taken, step_s, lengths, results.folder)
    claims += times.judge(taken, full)
    figures += times.draw(taken, results.folder, full)
    return claims, figures


PARTS = (study,)
