"""Run the command ``mpicomp``, as ``python -m mpicomp``."""

import sys

from mpicomp.cli.main import main

sys.exit(main())
