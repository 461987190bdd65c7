"""Record of the cost and the savings of compression against the best without it; start with `__main__.py`."""
