"""Waiting without blocking."""
