"""A rank of ``mpicomp run --gpus``: it sets the variables of torchrun, and becomes the program.

Programs read RANK and LOCAL_RANK before they load anything, so that no library can set them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from collectives.launcher import place_in_job, place_on_node


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, of which the launcher's numbers win.

    Raises
    ------
    ValueError
        The launcher does not provide them.
    """
    place = place_in_job(environ)
    found = {} if place is None else {"RANK": place[0], "WORLD_SIZE": place[1], **place_on_node(environ, place[1])}
    if "LOCAL_RANK" not in found:
        raise ValueError(
            "--gpus: the launcher does not number its ranks in variables that are known here: leave out --gpus, and "
            "call mpicomp.torch.register_backend() and mpicomp.torch.local_device(comm) first"
        )
    return {name: str(value) for name, value in found.items()}


def main(argv: Sequence[str]) -> int:
    """Become the program; return the exit status only where that fails."""
    try:
        os.environ.update(variables(os.environ))
        os.execvp(argv[0], [*argv])
    except (ValueError, OSError) as error:
        print(f"mpicomp run: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
