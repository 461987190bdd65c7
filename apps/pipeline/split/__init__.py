"""Split learning on images: clients in turn, whose labels are skewed, with activations in few bits (AQ-SGD, H.6)."""
