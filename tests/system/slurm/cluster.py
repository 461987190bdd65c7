"""Debian's Slurm as a cluster of two nodes on this machine, for the duration of a test session.

Everything runs in a process namespace of its own, whose end the kernel makes the end of every daemon, job step and rank
in it, and which itself ends with the process that made it. Each node is a ``slurmd`` with a hostname of its own. What
they share with the machine is its network, its files and its processors.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.system.slurm.job import POLL_S, WAIT_S, Job
from tests.system.slurm.processes import arguments, end_with_parent, link, processes

PROJECT = Path(__file__).resolve().parents[3]
NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd")
PACKAGES = "munge slurmctld slurmd slurm-client"
START_S = 120.0
# Jobs and nodes are declared, not found: a machine with one processor will do. A requeued job may start again when the
# credential of its last start has expired, 2 minutes later unless told otherwise.
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MessageTimeout=60
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

# The first process of the namespace: when it ends, all others do, and it ends when one of the daemons has.
_DAEMONS = """
munged --foreground --key-file=munge.key --socket="$PWD/munge.socket" --pid-file=munged.pid --seed-file=munge.seed \
    >munged.log 2>&1 &
until [[ -S munge.socket ]]; do
    kill -0 $! || exit
    sleep 0.05
done
slurmctld -D -c >slurmctld.log 2>&1 &
for node; do
    unshare --uts bash -c "$NODE" "$node" >"slurmd-$node.log" 2>&1 &
done
wait -n
"""

# A node comes up again when it may.
_NODE = """
hostname "$0"
while :; do
    [[ -e down-$0 ]] || slurmd -D -N "$0"
    sleep 0.2
done
"""


def missing() -> str | None:
    """Return the reason why there can be no Slurm here, with the cure; None if there can."""
    if os.geteuid():
        return "Slurm's daemons and namespaces need root: run this with sudo"
    absent = [name for name in (*DAEMONS, "sbatch", "srun", "scontrol", "scancel") if not _found(name)]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install {PACKAGES}"
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return (
        f"the kernel refuses namespaces, which root in a container may lack: {tried.stderr}" if tried.stderr else None
    )


_NAMESPACES = ("--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


class SlurmCluster:
    """Talks to the running daemons, whose end is that of `process`.

    Jobs are submitted in `project`, a folder with links to all that the project has, and no runs; with `env`.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], env: dict[str, str]) -> None:
        self._folder, self._process = folder, process
        self.env = env
        self.project = folder / "project"

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands and return its output; it fails if the command does."""
        done = subprocess.run(
            command, cwd=self.project, env=self.env, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}\n{self.logs}"
        return done.stdout.strip()

    def refusal(self, *command: str) -> str | None:
        """Run a command in an allocation of its own; return its output if it fails, None if it works."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=WAIT_S, check=False)
        return done.stderr.strip() if done.returncode else None

    def submit(self, name: str, *options: str, arguments: tuple[str, ...] = ()) -> Job:
        """Submit ``slurm/NAME.sbatch`` as a user does who has prepared his shell for ``mpirun`` on one machine."""
        submit = 'source slurm/env.sh && exec sbatch --parsable "$@"'
        number = self.run("bash", "-c", submit, "bash", *options, f"slurm/{name}.sbatch", *arguments)
        return Job(self, f"mpicomp-{name}", number)

    def states(self) -> set[str]:
        """Return the nodes' states, as ``idle``; empty while the controller does not answer."""
        listed = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], env=self.env, capture_output=True, text=True, check=False
        )
        return set(listed.stdout.split())

    @contextlib.contextmanager
    def crashed(self, node: str) -> Iterator[None]:
        """Stop a node: all its processes are killed, and its ``slurmd`` starts again when the block ends."""
        daemon = next(pid for pid in processes() if self._is_daemon(pid, node))
        uts = link(daemon, "ns/uts")
        down = self._folder / f"down-{node}"
        down.touch()
        for pid in processes():
            if link(pid, "ns/uts") == uts and arguments(pid)[:1] != ["bash"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            yield
        finally:
            down.unlink()

    def _is_daemon(self, pid: int, node: str) -> bool:
        return link(pid, "cwd") == str(self._folder) and arguments(pid) == ["slurmd", "-D", "-N", node]

    def check(self) -> None:
        """Fail if a daemon has ended."""
        assert self._process.poll() is None, f"a daemon has ended\n{self.logs}"

    @property
    def logs(self) -> str:
        """The daemons' last lines."""
        tails = {path.name: path.read_text(errors="replace").splitlines()[-15:] for path in self._folder.glob("*.log")}
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in sorted(tails.items()))


@contextlib.contextmanager
def open_cluster() -> Iterator[SlurmCluster]:
    """Start the daemons, yield the cluster when its nodes are idle, and end everything."""
    with contextlib.ExitStack() as stack:
        for last in (False, False, True):
            try:
                cluster = stack.enter_context(_started())
                break
            except AssertionError:  # the free ports that were found may be taken by now: once more, with others
                if last:
                    raise
        yield cluster


@contextlib.contextmanager
def _started() -> Iterator[SlurmCluster]:
    with contextlib.ExitStack() as stack:
        # Unix sockets have short names: pytest's own folders may be too deep.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        memory = Path("/dev/shm")
        segments = stack.enter_context(tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None))
        _prepare(folder)
        env = _environment(folder, segments)
        process = subprocess.Popen(
            ["unshare", *_NAMESPACES, "bash", "-c", _DAEMONS, "bash", *NODES],
            cwd=folder,
            env=env | {"NODE": _NODE},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        cluster = SlurmCluster(folder, process, env)
        deadline = time.monotonic() + START_S
        while cluster.states() != {"idle"}:
            cluster.check()
            assert time.monotonic() < deadline, f"Slurm has not started in {START_S:g} s\n{cluster.logs}"
            time.sleep(POLL_S)
        yield cluster


def _prepare(folder: Path) -> None:
    folder.chmod(0o755)  # munged insists that everybody may use its socket
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(secrets.token_bytes(64))
    (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, ports=free_ports(), host=socket.gethostname()))
    for name in ("state", "project", "tmp", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
        (folder / name).mkdir()
    for path in PROJECT.iterdir():
        if not path.name.startswith(".") and path.name != "runs":
            (folder / "project" / path.name).symlink_to(path)


def free_ports() -> list[int]:
    """Ports that nobody uses now: of the controller and of each node."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(1 + len(NODES))]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def _environment(folder: Path, segments: str) -> dict[str, str]:
    ours = ("SLURM", "SBATCH", "SRUN", "OMPI_", "PRTE_", "PMIX_")
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)} | {
        "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin",
        "SLURM_CONF": str(folder / "slurm.conf"),
        "MPICOMP_VENV": sys.prefix,
        "PYTHONUNBUFFERED": "1",
        # Ranks of both nodes share this machine's processors: they must not be bound to the same one, nor spin.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # What is ended by force leaves its files behind: not for long.
        "TMPDIR": str(folder / "tmp"),
        "OMPI_MCA_btl_sm_backing_directory": segments,
    }


def _found(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin") is not None
