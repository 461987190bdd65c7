"""Parts of all optimizers: the phases of a step, the agreement of the ranks on it, and the averages of its buckets."""
