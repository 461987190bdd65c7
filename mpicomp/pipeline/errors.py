"""What goes wrong in a pipeline."""

from __future__ import annotations


class PipelineError(RuntimeError):
    """A step of a pipeline failed on some stage; every stage raises it, and what was trained before is kept."""
