"""What all optimizers share: the phases of a step, the ranks' agreement on it, and the averages of its buckets."""
