"""Traces of calls: one file per rank in the Trace Event Format, which ui.perfetto.dev shows.

`recorder` keeps events and writes them, `event_format` has the lines of the file, and `clocks` measures the offset
between ranks' clocks. `traffic` counts bytes, messages and seconds, also without a trace.
"""

from collectives.trace.recorder import Trace, flush

__all__ = ["Trace", "flush"]
