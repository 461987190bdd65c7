"""Running a plan over MPI: what travels, the requests that carry it, and both executors."""
