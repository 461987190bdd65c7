"""Sums in full precision, broadcasts, and payloads whose sizes differ from rank to rank."""
