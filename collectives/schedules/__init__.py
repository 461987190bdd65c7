"""Schedules as data: pure functions from a rank and a number of ranks to a plan, and the proof of them."""
