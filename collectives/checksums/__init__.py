"""Checksums of messages: a communicator of MPI whose messages carry one each."""
