"""A root of trivial cases for a fleet of one machine, and the real command line on it."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ...processes import wait_for
from ...repositories import OPERATOR

BASELINE = """
REQUIRES = ("torch",)
IMPLEMENTATIONS = {"double": {"plain": lambda case: lambda x: x * 2}}
"""

PLAN = """
replicates = 1
cache = "hot"

[sampling]
min_samples = 3
max_samples = 3
min_seconds = 0
max_seconds = 1
warmup_s = 0

[[cases]]
operator = "double"
axes = {{ N = {sizes} }}
dtype = "fp32"
implementations = ["plain"]
"""


class Fleet:
    """`kernelmark` as its own process; `plan` writes a plan of so many cases."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.started: list[subprocess.Popen[str]] = []
        root = folder / "root"
        for name, text in (("operators/double.py", OPERATOR), ("baselines/many.py", BASELINE)):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        self.environment = {
            **{x: y for x, y in os.environ.items() if not x.startswith("KERNELMARK_")},
            "KERNELMARK_PATH": str(root),
            "KERNELMARK_HOME": str(self.home),
            "KERNELMARK_SALT": "salt",
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
        }

    def plan(self, cases: int) -> Path:
        path = self.folder / "tiny.toml"
        path.write_text(PLAN.format(sizes=list(range(16, 16 + cases))))
        return path

    def start(self, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kernelmark.suite", *arguments],
            env=self.environment,
            cwd=cwd or self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, cwd: Path | None = None) -> tuple[int, str]:
        process = self.start(*arguments, cwd=cwd)
        out, _ = process.communicate(timeout=800)
        return process.returncode, out

    def whole(self) -> list[str]:
        """The shards that are here."""
        return sorted(x.name for x in (self.home / "journals" / "shards").glob("*.jsonl"))


@pytest.fixture
def fleet(tmp_path: Path):
    """See `Fleet`; what it started is ended."""
    fleet = Fleet(tmp_path)
    yield fleet
    for process in fleet.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def missing(what: str) -> None:
    """Skips the test; in CI, where nothing may be skipped unseen, it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


class RayHosts:
    """See `ray_hosts.py`."""

    def __init__(self, hosts: int, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_hosts.py")), str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"},
            start_new_session=True,
        )
        try:
            self.address = self._said("address ")
        except BaseException:
            self.close()
            raise

    def _said(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError("the cluster did not start")

    def end(self, host: int) -> None:
        """A host dies."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host}\n")
        self._process.stdin.flush()
        self._said("ended")

    def close(self) -> None:
        try:
            self._process.communicate(timeout=60)  # which closes its input
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.communicate()


@pytest.fixture
def ray_hosts(fleet):
    """Starts a cluster of so many hosts, in the environment of the fleet."""
    started = []
    if find_spec("ray") is None:
        missing("Ray is not installed: make test-fleet")

    def start(hosts: int) -> RayHosts:
        started.append(RayHosts(hosts, fleet.environment))
        return started[-1]

    yield start
    for x in started:
        x.close()


SLURM = """
ClusterName=kernelmark
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=30
KillWait=2
BatchStartTimeout=10
SchedulerParameters=batch_sched_delay=1,sched_interval=5,requeue_delay=1
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=512
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


class SlurmHosts:
    """A controller and so many hosts of Slurm on the loopback interface, with munge, all of them our own."""

    def __init__(self, folder: Path, nodes: int, environment: dict[str, str]) -> None:
        self.folder = folder
        folder.mkdir()
        port = 20000 + os.getpid() % 20000
        text = SLURM.format(
            host=platform.node(),
            port=port,
            folder=folder,
            nodes=nodes,
            first=port + 1,
            last=port + nodes,
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        self.environment = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        munge += [f"--{x}-file={folder}/munge.{x}" for x in ("pid", "log", "seed")]
        self._start("munged", *munge)
        wait_for((folder / "munge.socket").exists, "munge")
        self._start("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for i in range(1, nodes + 1):
            self._start(f"n{i}", "slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", f"n{i}")
        wait_for(lambda: self.said("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * nodes, "hosts", 90)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "wb") as out:
            self.processes[name] = subprocess.Popen(
                command, stdout=out, stderr=out, env=self.environment, start_new_session=True
            )

    def said(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout

    def end(self, name: str) -> None:
        """A host dies, with all that runs on it."""
        self.processes[name].kill()
        self._kill(f"SLURMD_NODENAME={name}")
        self.said("scontrol", "update", f"nodename={name}", "state=down", "reason=died")

    def _kill(self, word: str = "") -> None:
        """Ends what we started, known by our configuration in its environment: jobs are nobody's children."""
        mine = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = path.read_bytes().split(b"\0")
                if mine in variables and (not word or word.encode() in variables):
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def close(self) -> None:
        self.said("scancel", "--user=root")
        self._kill()
        for process in self.processes.values():
            process.wait()


@pytest.fixture
def slurm_hosts(fleet, tmp_path):
    """Starts so many hosts of Slurm."""
    started = []
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    if os.geteuid() or not all(map(shutil.which, programs)):
        missing(f"{', '.join(programs)}, as root: apt-get install munge slurmctld slurmd slurm-client")

    def start(nodes: int) -> SlurmHosts:
        hosts = SlurmHosts.__new__(SlurmHosts)
        started.append(hosts)
        hosts.__init__(tmp_path / "slurm", nodes, fleet.environment)
        return hosts

    yield start
    for x in started:
        x.close()
