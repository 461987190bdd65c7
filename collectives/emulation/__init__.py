"""Slow links that one machine emulates, and the clock that the ranks of a node share for them."""
