"""What the user says of GPU memory in MPI: the environment's ``MPICOMP_GPU_MPI``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, cast

VARIABLE = "MPICOMP_GPU_MPI"
Mode = Literal["auto", "on", "off"]


def mode(environ: Mapping[str, str] = os.environ) -> Mode:
    """``"auto"``: where the library says that it can and a probe agrees; ``"on"``: it must; ``"off"``: never.

    Raises
    ------
    ValueError
        The variable is something else.
    """
    value = environ.get(VARIABLE) or "auto"
    if value not in ("auto", "on", "off"):
        raise ValueError(f"{VARIABLE} is {value!r}: it must be auto, on or off")
    return cast(Mode, value)
