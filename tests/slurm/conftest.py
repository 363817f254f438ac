"""Tests that want Slurm's daemons: the test starts a cluster of this one machine for itself."""

import getpass
import os
import shutil
import socket
import subprocess
import time

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")

CONF = """\
ClusterName=beamline
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """The environment variables of a cluster of this machine, which ends with the tests."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        pytest.exit(
            f"these tests need Slurm, and {', '.join(missing)} is missing: apt-get install "
            "slurm-wlm munge (slurmd, as root)",
            returncode=1,
        )
    if os.geteuid() != 0:
        pytest.exit("these tests start slurmd, which needs root", returncode=1)
    folder = tmp_path_factory.mktemp("slurm").resolve()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    names = {"host": host, "folder": folder, "user": getpass.getuser(), "cores": os.cpu_count()}
    ports = {"controller": free_port(), "daemon": free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(**names, **ports))
    environment = {"SLURM_CONF": str(conf), "PATH": path}
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    for name in ("key", "pid", "seed", "log"):
        option = {"key": "key-file", "pid": "pid-file", "seed": "seed-file", "log": "log-file"}
        munged.append(f"--{option[name]}={folder}/munge.{name}")
    daemons = [munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host]]
    started = []
    try:
        for daemon in daemons:
            with (folder / "daemons.log").open("ab") as log:
                started.append(
                    subprocess.Popen(daemon, env=os.environ | environment, stdout=log, stderr=log)
                )
            time.sleep(1)
        await_idle(environment, folder)
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.wait(30)


def await_idle(environment, folder, patience=60):
    """Wait until the node takes jobs."""
    deadline = time.monotonic() + patience
    while True:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        if "idle" in asked.stdout:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(f.read_text(errors="replace")[-2000:] for f in folder.glob("*.log"))
            raise RuntimeError(f"Slurm does not start: {asked.stdout}{asked.stderr}\n{logs}")
        time.sleep(0.5)
