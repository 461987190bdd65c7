"""All ranks in one process, as threads."""
