"""Execution of plans over MPI: programs, payloads, requests, both executors, and calls."""
