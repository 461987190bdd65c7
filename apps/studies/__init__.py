"""Runs of studies: results kept on disk, independent runs at the same time, and learning rates found by climbing."""
