"""The communicator of a group of ranks: `facade` has the class, other modules the parts that it holds.

Parts never refer to the communicator, which would be freed late as part of a cycle. Calls refer to it, and functions of
`exchanges`, `objects`, `point_to_point` and `splitting`, which are its methods, take it as their first argument.
"""

from __future__ import annotations

from collectives.communicator.facade import Communicator

__all__ = ["Communicator"]
