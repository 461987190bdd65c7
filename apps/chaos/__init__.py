"""Trainings with random faults: kills, churn, punished Slurm jobs, and mismatched calls."""
