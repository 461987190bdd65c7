"""States of optimizers and DDP hooks: their schema, other numbers of ranks, one rank's state for all."""
