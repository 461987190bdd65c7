# shellcheck shell=bash
# The environment of every MPI job of this project: sourced by the batch scripts in this folder, by the Makefile and by
# tests/run_lanes.py. Variables that are already set win. MPICOMP_VENV names another environment. The settings
# themselves are in mpicomp/cli/run/environment.py: `mpicomp run` has the same.

# without links: a folder with a link to this one may have no mpicomp
_project=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
_python=${MPICOMP_VENV:-$_project/.venv}/bin/python
if [[ -x $_python ]]; then
    export PATH=${_python%/python}:$PATH
else
    _python=python3
fi
_settings=$(PYTHONPATH=$_project${PYTHONPATH:+:$PYTHONPATH} "$_python" -m mpicomp.cli.run.environment) \
    || { echo "slurm/env.sh: $_python gives no settings: make setup, or name an environment by MPICOMP_VENV" >&2; false; }
eval "$_settings"
unset _project _python _settings
