# shellcheck shell=bash
# The environment of every MPI job of this project, in one place: sourced by the batch scripts in this folder, by the
# Makefile and by tests/run_lanes.py. Variables that are already set win. MPICOMP_VENV names another environment.

_project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
_venv=${MPICOMP_VENV:-$_project/.venv}
if [[ -x $_venv/bin/python ]]; then
    export PATH=$_venv/bin:$PATH
fi
unset _project _venv

# One thread per rank: the ranks share the cores, and thread pools of NumPy or torch would compete for them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Let PyTorch allocate large tensors in huge pages: each step's gradients are new memory, which the system clears page
# by page. This has no effect if the kernel offers no huge pages.
export THP_MEM_ALLOC_ENABLE=${THP_MEM_ALLOC_ENABLE:-1}

# Open MPI refuses to start as root unless both variables are set; containers and CI often have no other user.
if [[ $(id -u) == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# Over TCP, Open MPI sends messages of up to 64 KiB eagerly, and longer ones only after a handshake. With a higher limit
# messages are fewer and longer; mpicomp cuts its packed payloads to this limit.
for _name in eager_limit rndv_eager_limit max_send_size; do
    _name=OMPI_MCA_btl_tcp_$_name
    export "$_name=${!_name:-270336}"
done
unset _name

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    # On one machine, with perhaps more ranks than cores: let ranks share cores, move between them and yield while they
    # wait. Naming the transports saves a second of probing for networks at the start.
    for _setting in \
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe \
        PRTE_MCA_hwloc_default_binding_policy=none \
        OMPI_MCA_mpi_yield_when_idle=1 \
        OMPI_MCA_pml=ob1 \
        OMPI_MCA_btl=self,sm; do
        _name=${_setting%%=*}
        if [[ -z ${!_name:-} ]]; then
            export "${_setting?}" MPICOMP_ONE_MACHINE="${MPICOMP_ONE_MACHINE:-} $_name"
        fi
    done
    unset _setting _name
else
    # In a Slurm allocation MPI chooses: it knows the nodes, their cores and their network better than a script.
    # Settings that sbatch exported from a shell with this environment would put all ranks on the first node.
    # shellcheck disable=SC2086
    unset ${MPICOMP_ONE_MACHINE:-} MPICOMP_ONE_MACHINE
fi
