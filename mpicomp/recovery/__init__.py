"""Aggregators of ranks that may die: the joint end of a step, copies of residuals, and continuation among others."""
