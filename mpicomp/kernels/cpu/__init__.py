"""Loops compiled by Numba: arrays in, the result last, no allocation, no validation."""
