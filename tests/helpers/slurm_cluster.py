"""A Slurm of two nodes on this machine, from Debian's packages slurm-wlm and munge, for the tests of the job scripts.

Everything it needs and writes lies in one folder: keys, sockets, state, logs. Its daemons are ended by their process
ids, and nothing of the machine's own Slurm, if there is one, is touched.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
NODES = ("n1", "n2")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={control_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=requeue_delay=0,batch_sched_delay=0,sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=5
MessageTimeout=10
OverTimeLimit=0
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[0]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_programs() -> list[str]:
    """Programs of Slurm and munge that are not installed here."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listening in sockets:
            listening.bind(("127.0.0.1", 0))
        return [listening.getsockname()[1] for listening in sockets]
    finally:
        for listening in sockets:
            listening.close()


class SlurmCluster:
    """Started by ``start``, ended by ``stop``; ``environment`` is what Slurm's programs need to find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen] = {}
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin",
        }

    def start(self) -> None:
        """Start the daemons and wait until both nodes are ready."""
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        control_port, *ports = _free_ports(3)
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                folder=self.folder,
                user=getpass.getuser(),
                host=socket.gethostname().split(".")[0],
                control_port=control_port,
                ports=ports,
            )
        )
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munge.seed",
        )
        self._wait(lambda: (self.folder / "munge.socket").exists(), 20, "munged")
        self._start("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        for node in NODES:
            self.start_node(node)
        self._wait(lambda: self.run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], 60, "the nodes")

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start("slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"], name=node)

    def kill_node(self, node: str) -> None:
        """End a node's daemon and all that it runs, as if the node had lost its power."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        shown = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        for line in shown.splitlines():
            pid, _, arguments = line.strip().partition(" ")
            environment = Path(f"/proc/{pid}/environ")
            try:
                variables = environment.read_bytes() if pid.isdigit() else b""
            except OSError:
                continue
            is_of_cluster = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode() in variables
            stepd = arguments.startswith("slurmstepd") and str(self.folder) in os.readlink(f"/proc/{pid}/cwd")
            if (is_of_cluster and f"SLURMD_NODENAME={node}".encode() in variables) or stepd:
                os.kill(int(pid), 9)

    def run(self, *command: str, check: bool = True) -> str:
        """Output of one of Slurm's programs."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def state_of(self, job: str) -> tuple[str, int]:
        """State of a job and how often it was put into the queue again."""
        shown = dict(part.split("=", 1) for part in self.run("scontrol", "show", "job", job).split() if "=" in part)
        return shown["JobState"], int(shown["Restarts"])

    def wait_for_job(self, job: str, seconds: float) -> str:
        """The state in which a job ended."""
        ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")

        pending_since: float | None = None

        def has_ended() -> bool:
            nonlocal pending_since
            state, restarts = self.state_of(job)
            if state != "PENDING" or not restarts:
                pending_since = None
            elif pending_since is None:
                pending_since = time.monotonic()
            elif time.monotonic() - pending_since > 4:
                # Slurm lets a job that was put into the queue again wait for two minutes; a few seconds are enough for
                # the nodes to forget the credentials of its last start.
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            return state in ended

        self._wait(has_ended, seconds, f"job {job}")
        return self.state_of(job)[0]

    def stop(self) -> None:
        """End everything that was started."""
        if "slurmctld" in self.daemons:
            self.run("scancel", "--user", getpass.getuser(), check=False)
            time.sleep(1)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons.clear()

    def _start(self, program: str, *arguments: str, name: str | None = None) -> None:
        with (self.folder / f"{name or program}.out").open("a") as output:
            self.daemons[name or program] = subprocess.Popen(
                [program, *arguments], env=self.environment, stdout=output, stderr=output, cwd=self.folder
            )

    def _wait(self, condition: object, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except (RuntimeError, subprocess.TimeoutExpired):
                pass
            time.sleep(0.2)
        logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))
        raise RuntimeError(f"{what} did not come within {seconds} seconds\n{logs}")
