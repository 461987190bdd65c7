"""Traces of calls: one file per rank in the Trace Event Format, which ui.perfetto.dev shows.

`recorder` keeps events and writes them, `clock` finds out how the ranks' clocks differ, `follow` stands between the
executor and what it moves, `calls` is the communicator that records its calls. Of these a communicator without a trace
uses nothing.
"""

from collectives.trace.recorder import Trace, flush

__all__ = ["Trace", "flush"]
