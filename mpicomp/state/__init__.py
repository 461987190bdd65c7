"""States of aggregators: on disk, for another number of ranks, and their check before any of it is taken over."""
