"""Programs built on mpicomp, run from a checkout: ``mpirun -n 4 python -m apps.train``."""

import io
import os
import sys
import tempfile

if isinstance(sys.stdout, io.TextIOWrapper):  # an output of ASCII must not end a report
    sys.stdout.reconfigure(errors="replace")
if not os.environ.get("HOME"):  # Open MPI ends the process then
    os.environ["HOME"] = tempfile.gettempdir()
