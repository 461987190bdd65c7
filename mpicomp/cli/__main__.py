"""Run the command ``mpicomp``."""

import sys

from mpicomp.cli.main import main

sys.exit(main())
