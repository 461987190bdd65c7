"""Two levels: full precision among the ranks of a node, any method between the nodes."""
