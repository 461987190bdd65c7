"""Consistency among ranks: comparison of their calls, and search for missing ranks."""
