"""Local steps: each rank's optimizer moves its own model, and the ranks average the moves."""
