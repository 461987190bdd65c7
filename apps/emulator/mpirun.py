"""``mpirun`` over the cluster's hosts: options by which Open MPI and MPICH take them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from apps.emulator.network import SUBNET, ClusterError, Network
from apps.launch import PROJECT, find_mpirun, mpirun_version, run_or_raise

# Longer messages without a hand-shake: fewer of them, and less to do for the processors that all hosts share.
EAGER_BYTES = "270336"
TOLD_BY = {"openmpi": "Open MPI", "mpich": "HYDRA"}  # output of `mpirun --version`
LAUNCHER = """#!/bin/sh
# Stands in for ssh: launcher [options] address command...
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1; shift
case $address in
{cases}
*) echo "no host of this cluster: $address" >&2; exit 1;;
esac
exec ip netns exec "$namespace" unshare --uts sh -c "hostname $name && $*"
"""


def require_mpirun(mpi: str) -> None:
    """Raise ClusterError unless the ``mpirun`` here is that MPI's: another's would not know the options."""
    program = find_mpirun()
    try:
        told = mpirun_version(program)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{program} cannot be run: {error}") from error
    if TOLD_BY[mpi] not in told:
        raise ClusterError(
            f"{program} is not the launcher of --mpi {mpi}: it calls itself {told.partition(chr(10))[0]!r}; choose "
            f"--mpi by that, or use the Python of an environment with {mpi}"
        )


def mpirun(
    network: Network, folder: Path, mpi: str, ranks_per_node: int, command: Sequence[str], python: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs `command` on all hosts, for the first of them, and its environment."""
    # files in the folder must live as long as the job; `python` names the environment whose mpirun is taken
    nodes, hosts, launcher = network.nodes, folder / "hosts", folder / "launcher"
    cases = "\n".join(f"{node.address}|{node.name}) namespace={node.namespace} name={node.name};;" for node in nodes)
    launcher.write_text(LAUNCHER.format(cases=cases))
    launcher.chmod(0o755)
    if mpi == "openmpi":
        hosts.write_text("".join(f"{node.address} slots={ranks_per_node}\n" for node in nodes))
        settings = {
            "pml": "ob1",
            "btl": "tcp,self" if ranks_per_node == 1 else "tcp,self,sm",
            "btl_tcp_if_include": SUBNET,
            "mpi_yield_when_idle": "1",
            **{f"btl_tcp_{name}": EAGER_BYTES for name in ("eager_limit", "rndv_eager_limit", "max_send_size")},
        }
        chosen = [text for name, value in settings.items() for text in ("--mca", name, value)]
        runtime = ["--prtemca", "plm_ssh_agent", str(launcher), "--prtemca", "prte_if_include", SUBNET]
        placed = ["--hostfile", str(hosts), "--map-by", f"ppr:{ranks_per_node}:node:oversubscribe", "--bind-to", "none"]
        arguments = ["--allow-run-as-root", *runtime, *placed, *chosen]
        # A killed launcher's files in a common folder would end the next launcher that has its process id.
        extra = {"OMPI_MCA_btl": settings["btl"], "PRTE_MCA_prte_tmpdir_base": str(folder)}
    else:
        hosts.write_text("".join(f"{node.address}:{ranks_per_node}\n" for node in nodes))
        arguments = ["-launcher", "ssh", "-launcher-exec", str(launcher), "-f", str(hosts), "-iface", "eth0"]
        extra = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "MPIR_CVAR_CH4_NETMOD": "ofi"}
    # A job finds the launcher and Python by name as well.
    path = os.pathsep.join((str(Path(python or sys.executable).parent), os.environ.get("PATH", "")))
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | extra
    return [find_mpirun(python), *arguments, "-n", str(ranks_per_node * len(nodes)), *command], env


def run_on_hosts(
    network: Network,
    folder: Path,
    what: str,
    arguments: Sequence[str],
    timeout_s: float,
    *,
    mpi: str = "openmpi",
    python: Path | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
    ranks_per_node: int = 1,
) -> None:
    """Run Python with `arguments` on all hosts to its end; JobFailed if it fails or takes too long."""
    program = [str(python or sys.executable), *arguments]
    command, env = mpirun(network, folder, mpi, ranks_per_node, program, python)
    own = {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), env.get("PYTHONPATH")))), **settings}
    run_or_raise(what, network.nodes[0].command(command), own, timeout_s)
