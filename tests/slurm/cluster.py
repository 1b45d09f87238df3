"""A real SLURM of several virtual nodes on this machine: munged, slurmctld and one slurmd a node, all on loopback.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. Keys, sockets and state are private to it, and every
daemon is a child process, stopped by its pid.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "sinfo")


def missing() -> list[str]:
    """What this machine lacks for a cluster."""
    found = [name for name in PROGRAMS if _program(name) is None]
    return found if found or os.geteuid() == 0 else ["root"]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    def __init__(self, folder: Path, nodes: int, cpus: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._cpus = cpus
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", "log", "run", "munge", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o711)
        key = self.folder / "munge" / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self._write_config()
        sockets = [f"--socket={self.folder}/munge/munge.sock", f"--pid-file={self.folder}/run/munged.pid"]
        files = [f"--key-file={key}", f"--log-file={self.folder}/log/munged.log", f"--seed-file={self.folder}/munge/munge.seed"]
        self._daemon("munged", ["--foreground", "--force", *sockets, *files])
        self.until((self.folder / "munge" / "munge.sock").exists, "munged to listen")
        self._daemon("slurmctld", ["-D", "-f", f"{self.folder}/slurm.conf"])
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.idle() == self.nodes, "all nodes to be idle")

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", ["-D", "-f", f"{self.folder}/slurm.conf", "-N", node], node)

    def kill_node(self, node: str) -> None:
        """What a machine that loses power looks like to the controller."""
        self._daemons[node].kill()
        self._daemons[node].wait(10.0)

    def stop(self) -> None:
        if "slurmctld" in self._daemons and self._daemons["slurmctld"].poll() is None:
            self.ask("scancel", "--user=root", "--full", check=False)
            self.until(lambda: self.ask("squeue", "--noheader", check=False) == "", "the last job to end", fails=False)
        for daemon in reversed(list(self._daemons.values())):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10.0)

    def idle(self) -> list[str]:
        return sorted(self.ask("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", check=False).split())

    def ask(self, program: str, *arguments: str, cwd: Path | None = None, check: bool = True) -> str:
        """What one of SLURM's programs prints."""
        done = subprocess.run(
            [program, *arguments], env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, (program, arguments, done.stdout, done.stderr)
        return done.stdout.strip() or (done.stderr.strip() if check else "")

    def submit(self, script: Path, *options: str) -> str:
        """The job's number; the script is submitted from its own folder. options: of `train`."""
        return self.ask("sbatch", "--parsable", script.name, *options, cwd=script.parent)

    def job(self, number: str) -> dict[str, str]:
        """What scontrol knows about a job: JobState, Restarts, ExitCode and so on."""
        text = self.ask("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for_end(self, number: str, limit: float) -> dict[str, str]:
        """The job's last facts, when it neither runs, nor waits, nor is about to be requeued."""
        going_on = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")
        self.until(lambda: self.job(number)["JobState"] not in going_on, f"job {number} to end", limit)
        return self.job(number)

    def until(self, true: Callable[[], object], what: str, limit: float = 60.0, fails: bool = True) -> None:
        deadline = time.monotonic() + limit
        while not true():
            if time.monotonic() > deadline:
                assert not fails, f"waited {limit:.0f} s for {what}\n{self._last_words()}"
                return
            time.sleep(0.1)

    def _last_words(self) -> str:
        logs = sorted((self.folder / "log").glob("*"))
        return "\n".join(f"--- {log.name}\n{''.join(log.read_text(errors='replace').splitlines(True)[-8:])}" for log in logs)

    def _daemon(self, program: str, arguments: Sequence[str], name: str = "") -> None:
        path = _program(program)
        assert path is not None
        log = self.folder / "log" / f"{name or program}.out"
        with log.open("ab") as out:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _write_config(self) -> None:
        folder, host, ports = self.folder, socket.gethostname().split(".")[0], _ports(1 + len(self.nodes))
        lines = [
            "ClusterName=mini",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/munge.sock,cred_expire=5",  # a requeued job waits for it
            "CredType=cred/munge",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/run/slurmctld.pid",
            f"SlurmdPidFile={folder}/run/slurmd-%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,defer",
            "SlurmdParameters=config_overrides",
            "GresTypes=gpu",
            "ReturnToService=2",
            "JobRequeue=1",
            "KillWait=20",
            "SlurmdTimeout=10",
            "MinJobAge=3600",
        ]
        for port, node in zip(ports[1:], self.nodes, strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} RealMemory=8000 Gres=gpu:8"
            )
        lines.append("PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "devices").mkdir()
        for number in range(8):  # copies of /dev/null: SLURM wants character devices
            os.mknod(folder / "devices" / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        gres = "".join(f"NodeName={node} Name=gpu File={folder}/devices/gpu[0-7]\n" for node in self.nodes)
        (folder / "gres.conf").write_text(gres)
        # Releases differ in which cgroup plug-ins there are; nothing above uses one.
        version = subprocess.run([str(_program("slurmd")), "-V"], capture_output=True, text=True, timeout=20, check=True).stdout
        plugin = "cgroup/v1" if version.split()[1].startswith(("21", "22")) else "disabled"
        (folder / "cgroup.conf").write_text(
            f"CgroupPlugin={plugin}\nCgroupAutomount=no\n" if "v1" in plugin else f"CgroupPlugin={plugin}\n"
        )


def _ports(count: int) -> list[int]:
    """Free ports, all held open until the last is known."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
