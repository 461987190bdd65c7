"""Sums in full precision, and payloads whose sizes differ from rank to rank."""
