"""Try the claims of papers again, at the size of one small machine."""
