"""Train a model in pipeline stages whose activations, and their gradients, travel in a few bits (AQ-SGD)."""
