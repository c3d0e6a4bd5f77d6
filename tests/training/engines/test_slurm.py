"""The script of docs/how-to/slurm.md in a real Slurm: a controller and two nodes, in namespaces of their own."""

import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolated_nodes import IsolatedMachine, Node, isolated_machine, missing_namespaces, wait_for
from small_training import (
    SAVE_EVERY,
    assert_losses_of_an_unbroken_run,
    assert_resumed_once_from_a_checkpoint,
    losses,
    resumed_steps,
    wait_for_step,
    write_run,
)

SCRIPT = Path(__file__).parents[3] / "docs/how-to/launch/slurm.sbatch"

NODES = ["n1", "n2"]

INSTALL = "needs Slurm with munge: apt-get install --no-install-recommends slurm-wlm munge"

CONFIGURATION = """
ClusterName=manyformer-test
SlurmctldHost=head(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a job waits so long before it is started again; 120 by default
AuthInfo=socket={folder}/munge.socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=30
JobRequeue=1
NodeName=n1 NodeAddr=10.77.0.2 Port=26818 CPUs=1 State=UNKNOWN
NodeName=n2 NodeAddr=10.77.0.3 Port=26819 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Cluster:
    """Slurm with nodes that can be lost."""

    def __init__(self, machine: IsolatedMachine, folder: Path) -> None:
        self.machine = machine
        start_munge = " ".join(
            [
                f"munged --force --key-file={folder}/munge.key --socket={folder}/munge.socket",
                f"--pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed",
            ]
        )
        machine.run("bash", "-c", start_munge)
        machine.run("slurmctld")
        self.nodes: dict[str, Node] = {}
        for name in NODES:
            self.start(name)

    def start(self, name: str) -> None:
        self.nodes[name] = self.machine.start_node(name, "slurmd")
        wait_for(lambda: self.state_of(name) == "IDLE", f"{name} to be idle")

    def state_of(self, node: str) -> str:
        found = re.search(r"State=(\S+)", self.machine.run("scontrol", "show", "node", node))
        return "" if found is None else found[1]

    def submit(self, folder: Path, *arguments: str) -> str:
        """The number of a job of the script, with one process on the CPU of each node."""
        *options, nodes = arguments or ("",)
        command = ["sbatch", "--gpus-per-node=0", *options, str(SCRIPT), *filter(None, [nodes])]
        return self.machine.run(*command, folder=folder).split()[-1]

    def job(self, number: str) -> dict[str, str]:
        text = self.machine.run("scontrol", "show", "job", number)
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def wait_for_state(self, number: str, *states: str) -> dict[str, str]:
        wait_for(lambda: self.job(number)["JobState"] in states, f"job {number} to be {states}: {self.job(number)}")
        return self.job(number)


@pytest.fixture(scope="module")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    programs = ("slurmctld", "slurmd", "sbatch", "munged")
    if problem := missing_namespaces():
        pytest.skip(problem)
    if any(shutil.which(program) is None for program in programs):
        pytest.skip(INSTALL)
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    # `python` of the script is this one; a cluster of this machine is not asked
    variables = {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with isolated_machine(folder, NODES, variables) as machine:
        yield Cluster(machine, folder)


@pytest.fixture
def cluster(started_cluster: Cluster) -> Cluster:
    """With both nodes, whatever an earlier test has lost."""
    for name, node in started_cluster.nodes.items():
        if node.is_lost:
            started_cluster.start(name)
    return started_cluster


def log_of(folder: Path, job: str) -> str:
    return (folder / f"manyformer-{job}.log").read_text()


def test_the_time_limit_a_preemption_and_a_lost_node_change_no_loss(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work")
    out = folder / "runs/mine"
    job = cluster.submit(folder)

    # what Slurm sends before the time limit, with `--signal=B:USR1@120`
    wait_for_step(out, 7)
    cluster.machine.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_for_state(job, "PENDING")
    assert len(re.findall(r"stopped at step \d+, saved", log_of(folder, job))) == 2
    stopped_at = len(losses(out))

    # what Slurm does to a preempted job: TERM, KillWait, KILL, and a place in the queue
    wait_for_step(out, stopped_at + 3)
    cluster.machine.run("scontrol", "requeue", job)
    cluster.wait_for_state(job, "PENDING")
    assert len(re.findall(r"stopped at step \d+, saved", log_of(folder, job))) == 4
    preempted_at = len(losses(out))

    wait_for_step(out, preempted_at + 7)
    cluster.nodes["n2"].lose()
    cluster.wait_for_state(job, "PENDING")
    cluster.start("n2")

    done = cluster.wait_for_state(job, "COMPLETED", "FAILED", "NODE_FAIL")
    assert (done["JobState"], done["Restarts"]) == ("COMPLETED", "3"), log_of(folder, job)
    first, second, third = resumed_steps(out)
    # after a signal at the very step, after a lost node at the last multiple of save.every
    assert (first, second) == (stopped_at, preempted_at)
    assert third % SAVE_EVERY == 0
    assert_losses_of_an_unbroken_run(out, folder)


def test_the_nodes_that_are_left_go_on(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work")
    out = folder / "runs/mine"
    job = cluster.submit(folder, "--no-kill", "1:2")
    wait_for_step(out, 12)
    cluster.nodes["n2"].lose()
    done = cluster.wait_for_state(job, "COMPLETED", "FAILED", "NODE_FAIL", "PENDING")
    assert (done["JobState"], done["Restarts"]) == ("COMPLETED", "0"), log_of(folder, job)
    assert_resumed_once_from_a_checkpoint(out)
    assert_losses_of_an_unbroken_run(out, folder)


@pytest.mark.parametrize("arguments", [(), ("--no-kill", "1:2")], ids=["requeue", "no-kill"])
def test_a_job_that_loses_its_first_node_goes_on(cluster: Cluster, arguments: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work")
    out = folder / "runs/mine"
    job = cluster.submit(folder, *arguments)
    wait_for_step(out, 12)
    cluster.nodes["n1"].lose()
    if arguments:
        # Slurm lets such a job hold its nodes, without the script that was on the first one
        wait_for(lambda: cluster.state_of("n1").startswith("DOWN"), "n1 to be given up")
        assert cluster.job(job)["JobState"] == "RUNNING"
        cluster.machine.run("scontrol", "requeue", job)
    cluster.wait_for_state(job, "PENDING", "NODE_FAIL", "FAILED")
    cluster.start("n1")
    done = cluster.wait_for_state(job, "COMPLETED", "FAILED", "NODE_FAIL")
    assert (done["JobState"], done["Restarts"]) == ("COMPLETED", "1"), log_of(folder, job)
    assert_resumed_once_from_a_checkpoint(out)
    assert_losses_of_an_unbroken_run(out, folder)


def test_a_job_that_its_user_cancels_is_saved_and_not_started_again(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work")
    job = cluster.submit(folder)
    wait_for_step(folder / "runs/mine", 2)
    cluster.machine.run("scancel", job)
    done = cluster.wait_for_state(job, "CANCELLED", "PENDING", "COMPLETED", "FAILED")
    assert (done["JobState"], done["Restarts"]) == ("CANCELLED", "0")
    wait_for(lambda: cluster.state_of("n1") == "IDLE", "the processes to end")
    assert "saved. The same command continues." in log_of(folder, job)


def test_a_mistake_in_the_settings_ends_the_job_at_once(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work", modell={"dim": 18})
    job = cluster.submit(folder)
    done = cluster.wait_for_state(job, "FAILED", "COMPLETED")
    assert (done["JobState"], done["Restarts"], done["ExitCode"]) == ("FAILED", "0", "2:0")
    assert log_of(folder, job).count("modell") == 1, log_of(folder, job)
