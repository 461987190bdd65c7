"""Token buckets, which hold links to a rate."""

from __future__ import annotations

from collectives.cost.rate import Rate

# More than the 64 KiB and headers that TCP hands down at once: else the bucket cuts them into packets and, with a timer
# for each, does not reach the rate.
SMALLEST_BURST_BYTES = 80_000
BURST_S = 1e-3  # a larger bucket hides the limit from short messages
QUEUE_S = 0.05
SMALLEST_QUEUE_BYTES = 1_000_000


def token_bucket(rate: Rate) -> list[str]:
    """Return the arguments of ``tc qdisc add dev ...`` that hold a device's egress to a rate."""
    assert rate.bits_per_s is not None
    # the bytes of a millisecond
    burst = max(SMALLEST_BURST_BYTES, round(rate.bits_per_s / 8 * BURST_S))
    # so long that TCP need not drop
    queue = max(SMALLEST_QUEUE_BYTES, round(rate.bits_per_s / 8 * QUEUE_S))
    return ["tbf", "rate", f"{rate.bits_per_s:.0f}bit", "burst", f"{burst}", "limit", f"{burst + queue}"]
