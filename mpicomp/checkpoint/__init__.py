"""States on disk, and for another number of ranks."""
