"""Whether all ranks make the same call, and which ranks are missing."""
