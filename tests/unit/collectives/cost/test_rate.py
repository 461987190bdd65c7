"""How rates and emulated links are written."""

from __future__ import annotations

import pytest

from collectives.cost.rate import EmulatedLink, Rate


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "latency_s", "words"),
    [
        ("100mbit", 12.5e6, 0.0, "100 Mbit/s"),
        ("2.5Gbit", 312.5e6, 0.0, "2.5 Gbit/s"),
        ("1gbit,50us", 125e6, 50e-6, "1 Gbit/s, 50 us"),
        (" 10 mbit , 2ms ", 1.25e6, 2e-3, "10 Mbit/s, 2000 us"),
    ],
)
def test_a_link_is_a_rate_and_perhaps_a_latency(text: str, bytes_per_s: float, latency_s: float, words: str) -> None:
    link = EmulatedLink.parse(text)
    assert (link.bytes_per_s, link.latency_s, str(link)) == (bytes_per_s, pytest.approx(latency_s), words)


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100mbit,", "100mbit,5", "100mbit,2s", "0mbit", "none", "1gbit,1ms,2"]
)
def test_another_text_raises_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is no link: write a rate, such as 100mbit"):
        EmulatedLink.parse(text)


def test_rates_are_written_with_the_largest_unit() -> None:
    assert [str(Rate.parse(text)) for text in ("1000mbit", "64kbit", "none")] == ["1 Gbit/s", "64 kbit/s", "unlimited"]
