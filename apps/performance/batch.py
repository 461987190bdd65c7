"""Several training runs in one MPI job: ``mpirun -n 4 python -m apps.performance.batch runs.json``.

Starting a job takes longer than training a small model. The file holds a list of argument lists of ``apps.train``; a
run that diverges does not keep the next ones from starting, a run that fails does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from apps.train.__main__ import main as train
from apps.train.report import STATUS_DIVERGED


def main() -> int:
    """Train them in order; the exit status of the first that failed, or 0."""
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        status = train(arguments)
        if status not in (0, STATUS_DIVERGED):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
