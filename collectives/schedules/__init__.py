"""Schedules as data: pure functions from (rank, number of ranks) to a plan, and the proof of plans."""
