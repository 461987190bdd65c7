"""Aggregators, which keep the residual, step counter and calls of one vector."""
