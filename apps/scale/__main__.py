"""``python -m apps.scale``: plots of what up to 4096 ranks would do, simulated from the topologies' own plans."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from apps.scale.plots import Model, plot_split, plot_throughput, plot_times, points
from apps.scale.simulations import powers, simulate
from collectives import LinkModel
from collectives.cost.rate import Rate

SPLIT_RANKS = (8, 32, 128)
DATA = Path("docs/figures/data/scale.json")
GROUP_FASTER = 10  # a group's own links, next to its uplink


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    rate = options.rate.bits_per_s
    if rate is None:
        parser.error("--rate none: links without a limit cannot be modelled")
    if any(count % options.group for count in powers(options.most_ranks) if count > options.group):
        parser.error(f"--group {options.group}: ranks go up in powers of 4, so groups are of 2, 4, 8, 16, ... ranks")
    speed, latency_s = rate / 8, 1e-6 * options.latency_us
    networks = {
        f"{options.rate} for each rank": LinkModel(latency_s, speed),
        f"{options.group} ranks share {options.rate}": LinkModel(
            latency_s / 4, GROUP_FASTER * speed, group_size=options.group, between_latency_s=latency_s,
            uplink_bytes_s=speed,
        ),
    }  # fmt: skip
    model = Model(int(options.parameters), 1e-3 * options.compute_ms, options.batch)
    ranks = powers(options.most_ranks)
    n = int(options.count)
    shared = next(reversed(networks.values()))
    split_ranks = [count for count in SPLIT_RANKS if count <= options.most_ranks]
    wanted = points(networks, model, n, ranks, split_ranks)
    times = simulate(wanted, options.json, options.processes)
    folder: Path = options.out
    plot_times(networks, n, ranks, times, folder / "scale-times.png")
    plot_throughput(networks, model, ranks, times, folder / "scale-throughput.png")
    plot_split(shared, model, (model.batch // 4 or 1, model.batch), split_ranks, times, folder / "scale-split.png")
    print(f"{len(wanted)} simulations in {options.json}; plots in {folder}: scale-times, -throughput, -split")
    return 0


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _rate(text: str) -> Rate:
    try:
        return Rate.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        value = _positive(text)
        if value != int(value) or value < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        return int(value)

    return count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.scale",
        description="Time against ranks, throughput against processors, and where a step goes, on modelled networks.",
    )
    parser.add_argument("--count", type=_positive, default=25e6, help="elements in the first plot (default 25e6)")
    parser.add_argument("--parameters", type=_positive, default=25.6e6, help="of the model (default 25.6e6, ResNet-50)")
    parser.add_argument("--compute-ms", type=_positive, default=100.0, help="of a step (default %(default)g)")
    parser.add_argument("--batch", type=_count(1), default=32, help="samples of a processor and step (%(default)s)")
    parser.add_argument("--rate", type=_rate, default=Rate.parse("10gbit"), help="of links (default %(default)s)")
    parser.add_argument("--latency-us", type=_positive, default=20.0, help="between nodes (default %(default)g)")
    parser.add_argument("--group", type=_count(2), default=4, help="ranks that share an uplink (default %(default)s)")
    parser.add_argument("--most-ranks", type=_count(4), default=4096, help="how far to go (default %(default)s)")
    parser.add_argument("--processes", type=_count(1), help="that simulate at once (default: all cores)")
    parser.add_argument("--json", type=Path, default=DATA, help="what was simulated (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder of the plots (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
