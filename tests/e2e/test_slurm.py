"""scripts/slurm/slurm_script.sh for real: SLURM on loopback with two made-up nodes, and a Ray cluster over them."""

import contextlib
import fcntl
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, skip_or_fail

SCRIPT = ROOT / "scripts" / "slurm" / "slurm_script.sh"
RAY = Path(sys.executable).parent / "ray"
NODES = ("fake1", "fake2")

CONFIGURATION = """
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=fake1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:8 State=UNKNOWN
NodeName=fake2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=fake[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def free_ports(count):
    """Ports below those that the system gives to connections and servers of its own choice, here 32768 and more."""
    found = []
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found[:count]


class Cluster:
    """Munge, a controller and two node daemons, all in one folder; nothing of the system's own is touched."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, []
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self):
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, ports=free_ports(3)))
        for index in range(8):
            (self.folder / f"gpu{index}").touch()
        (self.folder / "gres.conf").write_text(f"NodeName=fake[1-2] Name=gpu File={self.folder}/gpu[0-7]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        names["seed-file"] = "munge.seed"
        options = [f"--{option}={self.folder / name}" for option, name in names.items()]
        self.spawn("munged", "--foreground", "--force", *options)
        self.wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self.spawn("slurmctld", "-D")
        for node in NODES:
            self.spawn("slurmd", "-D", "-N", node)
        self.wait(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], "nodes")

    def spawn(self, program, *arguments):
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        log = (self.folder / f"{program}-{len(self.daemons)}.out").open("wb")
        self.daemons.append(subprocess.Popen([path, *arguments], env=self.env, stdout=log, stderr=log))

    def run(self, *command):
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
        return done.stdout if done.returncode == 0 else ""

    def wait(self, ready, what, timeout_s=60):
        end = time.monotonic() + timeout_s
        while not ready():
            assert time.monotonic() < end, f"{what} did not come up:\n{self.logs()}"
            time.sleep(0.2)

    def logs(self):
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def submit(self, *options, timeout_s=240, **variables):
        """Run the script as a job; (exit code, its output)."""
        output = self.folder / f"job-{time.monotonic_ns()}.log"
        exported = {"RAY": str(RAY), "PYTHON": sys.executable, "RAY_PORT": str(free_ports(1)[0]), **variables}
        env = {**self.env, **exported, "RAY_TMPDIR": str(self.folder / "ray"), "OMP_NUM_THREADS": "1"}
        command = ["sbatch", "--parsable", f"--output={output}", "--ntasks-per-node=1", *options, str(SCRIPT)]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + self.logs()
        end = time.monotonic() + timeout_s
        while True:
            job = self.run("scontrol", "show", "job", "--oneliner", done.stdout.strip())
            state = re.search(r"JobState=(\S+)", job).group(1)
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return int(re.search(r"ExitCode=(\d+)", job).group(1)), output.read_text()
            assert time.monotonic() < end, f"the job is still {state}:\n{output.read_text()}\n{self.logs()}"
            time.sleep(0.3)

    def stop(self):
        self.run("scancel", "--user", "root")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


@pytest.fixture(scope="module")
def cluster():
    missing = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if not shutil.which(name, path=SEARCH)]
    if missing:
        skip_or_fail(f"{', '.join(missing)} not installed; run .ci/install_system_packages.sh")
    if os.geteuid() != 0:
        skip_or_fail("the node daemons of SLURM need root")
    folder = Path(f"/tmp/slurm-{os.getpid()}")  # short: sockets have short names
    folder.mkdir(mode=0o755)
    running = Cluster(folder)
    with open("/tmp/verl-test-slurm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two Ray heads on one machine want the same ports
        try:
            running.start()
            yield running
        finally:
            running.stop()
            shutil.rmtree(folder, ignore_errors=True)


SEARCH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def test_a_ray_cluster_comes_up_over_two_nodes_and_the_command_runs(cluster):
    if not RAY.exists():
        skip_or_fail("ray is not installed; pip install -e '.[ray]'")
    code, output = cluster.submit(
        "--nodes=2",
        "--gpus-per-node=8",
        CONTAINER="none",
        VENDOR="amd",
        COMMAND='echo "command on $SLURMD_NODENAME sees $HIP_VISIBLE_DEVICES at $RAY_ADDRESS"',
    )
    assert code == 0, output
    assert "ray: 2 nodes, 8 GPUs each, a task ran on each: fake1 fake2" in output
    assert "command on fake1 sees 0,1,2,3,4,5,6,7 at 127.0.0.1:" in output
    assert not leftovers(cluster.folder), "ray processes outlived the job"


def test_the_commands_failure_is_the_jobs(cluster):
    if not RAY.exists():
        skip_or_fail("ray is not installed; pip install -e '.[ray]'")
    code, output = cluster.submit("--nodes=1", "--gpus-per-node=2", CONTAINER="none", VENDOR="none", COMMAND="exit 7")
    assert code == 7, output
    assert not leftovers(cluster.folder)


def leftovers(folder):
    """Ray processes of these jobs that are still there a few seconds after the job."""
    for _ in range(50):
        found = subprocess.run(
            ["pgrep", "-f", f"{folder}/ray"], capture_output=True, text=True, check=False
        ).stdout.split()
        if not found:
            return []
        time.sleep(0.2)
    return found


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_containers_are_started_used_and_removed_on_every_node(cluster, tmp_path, program):
    """The container program is one that writes down how it was called and runs what it is given on the node itself."""
    if not RAY.exists():
        skip_or_fail("ray is not installed; pip install -e '.[ray]'")
    folder = cluster.folder / program
    folder.mkdir()
    fake, calls = folder / program, folder / "calls"
    fake.write_text(
        f'#!/bin/bash\necho "$SLURMD_NODENAME $*" >>{calls}\n'
        "[[ $1 == exec ]] || exit 0\nshift\n"
        'while [[ $1 == --* ]]; do [[ $1 == --workdir ]] && cd "$2"; shift 2; done\nshift\nexec "$@"\n'
    )
    fake.chmod(0o755)
    code, output = cluster.submit(
        "--nodes=2",
        "--gpus-per-node=8",
        CONTAINER=program,
        IMAGE="acme/verl:1",
        VENDOR="nvidia",
        MOUNTS="/data:/models",
        COMMAND="echo done",
        PATH=f"{folder}:{os.environ['PATH']}",
    )
    assert code == 0, output
    lines = calls.read_text().splitlines()
    started = [line for line in lines if " run " in line]
    assert sorted(line.split()[0] for line in started) == ["fake1", "fake2"]
    assert all("--volume /data:/data --volume /models:/models acme/verl:1 sleep infinity" in line for line in started)
    gpus = {"docker": "--gpus all", "podman": "--device nvidia.com/gpu=all"}[program]
    assert all(gpus in line for line in started)
    assert sum(" rm --force verl_" in line for line in lines) == 2
    assert "a task ran on each: fake1 fake2" in output and "done" in output


def test_a_container_without_an_image_is_refused_before_anything_starts(cluster):
    code, output = cluster.submit("--nodes=1", CONTAINER="podman")
    assert code == 2 and "IMAGE is not set" in output
