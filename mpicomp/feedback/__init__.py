"""State that a rank carries from step to step, and how it enters a step: a file per family of methods."""
