"""Layers around the steps of an aggregator's calls. A call without the need of one does not pass through it."""
