"""One vector's residual, step counter and calls."""
