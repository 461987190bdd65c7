"""1-bit Adam and its relatives, LAMB and 0/1 Adam: optimizers whose ranks exchange momenta."""
