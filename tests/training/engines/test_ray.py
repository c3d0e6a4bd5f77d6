"""The script of docs/how-to/ray.md on a real Ray cluster of two nodes, in namespaces of their own.

Ray listens on all addresses and asks nobody for a password: outside of such namespaces these tests would open this
machine to its network.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolated_nodes import LONGEST, IsolatedMachine, Node, NodeFailed, isolated_machine, missing_namespaces, wait_for
from small_training import (
    assert_losses_of_an_unbroken_run,
    assert_resumed_once_from_a_checkpoint,
    wait_for_step,
    write_run,
)

REPOSITORY = Path(__file__).parents[3]

PYTHON = Path(os.environ.get("MANYFORMER_RAY_PYTHON", sys.executable))
"""A Python that has Ray and what manyformer needs: Ray need not be in the environment of the tests."""

INSTALL = "needs Ray: pip install 'manyformer[ray]', or MANYFORMER_RAY_PYTHON=/path/of/a/python that has it"

NODES = ["n1", "n2"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Job:
    """A submitted job and what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self._process.wait(LONGEST)


class Cluster:
    """Ray with a head, n1, that stays, and a node, n2, that can be lost."""

    def __init__(self, machine: IsolatedMachine, temporary: Path) -> None:
        self.machine = machine
        self._temporary = temporary
        self._head = machine.addresses["n1"]
        self.nodes: dict[str, Node] = {}
        dashboard = f"--dashboard-host={self._head} --dashboard-port=28265"
        self._start("n1", f"--head --port=26379 {dashboard} --temp-dir={temporary}")
        self.start_second()

    def start_second(self) -> None:
        self._start("n2", f"--address={self._head}:26379")

    def _start(self, name: str, options: str) -> None:
        size = "--num-cpus=1 --object-store-memory=100000000 --disable-usage-stats"
        address = f"--node-ip-address={self.machine.addresses[name]}"
        # where Ray keeps logs and copies of submitted folders: each node has its own, under the same name
        own = f"mkdir -p {self._temporary}.{name}; mount --bind {self._temporary}.{name} {self._temporary}"
        wait_for(lambda: self._has_started(name, f"{own}\nray start {options} {address} {size}"), name)

    def _has_started(self, name: str, command: str) -> bool:
        """Ray gives up on a node that does not start within 30 seconds, as on a busy machine."""
        try:
            self.nodes[name] = self.machine.start_node(name, command)
        except NodeFailed:
            return False
        return True

    def submit(self, folder: Path, *arguments: str) -> Job:
        """The documented command, with CPUs."""
        shutil.copy(REPOSITORY / "docs/how-to/launch/ray_launch.py", folder)
        command = ["ray", "job", "submit", f"--address=http://{self._head}:28265", "--working-dir=.", "--", "python"]
        command += ["ray_launch.py", "mine.yaml", "strategy=fsdp", f"out={folder}/runs/mine", "--cpu", *arguments]
        log = folder / "job.log"
        return Job(self.machine.start(command, folder, log), log)


@pytest.fixture(scope="module")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if problem := missing_namespaces():
        pytest.skip(problem)
    if subprocess.run([PYTHON, "-c", "import ray.train, ray.dashboard.modules.job"], capture_output=True).returncode:
        pytest.skip(INSTALL)
    folder = tmp_path_factory.mktemp("ray")
    path = os.pathsep.join([str(PYTHON.parent), os.environ["PATH"]])
    sources = os.pathsep.join(filter(None, [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")]))
    variables = {"PATH": path, "PYTHONPATH": sources}
    # short: names of sockets below it must not be longer than some hundred letters
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as short,
        isolated_machine(folder, NODES, variables) as machine,
    ):
        temporary = Path(short) / "t"
        temporary.mkdir()
        yield Cluster(machine, temporary)


@pytest.fixture
def cluster(started_cluster: Cluster) -> Cluster:
    """With both nodes, whatever an earlier test has lost."""
    if started_cluster.nodes["n2"].is_lost:
        started_cluster.start_second()
    return started_cluster


def test_a_lost_node_changes_no_loss(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work")
    out = folder / "runs/mine"
    job = cluster.submit(folder, "--processes=2")
    wait_for_step(out, 12)
    cluster.nodes["n2"].lose()
    wait_for(lambda: "[FailurePolicy] RETRY" in job.printed, "Ray Train to notice")
    cluster.start_second()
    assert job.wait() == 0, job.printed
    assert_resumed_once_from_a_checkpoint(out)
    assert_losses_of_an_unbroken_run(out, folder)


def test_the_nodes_that_are_left_go_on(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work")
    out = folder / "runs/mine"
    job = cluster.submit(folder, "--processes=2", "--least=1")
    wait_for_step(out, 12)
    assert "2 processes (fsdp)" in (out / "log.txt").read_text()
    cluster.nodes["n2"].lose()
    assert job.wait() == 0, job.printed
    assert_resumed_once_from_a_checkpoint(out)
    assert_losses_of_an_unbroken_run(out, folder)


def test_data_that_is_missing_is_tried_once(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work")
    (folder / "text.txt").unlink()
    job = cluster.submit(folder, "--processes=2")
    assert job.wait() == 1
    assert "failed with exit code 2" in job.printed
    assert f"error: {folder}/text.txt: there is no such file" in job.printed
    assert "FailurePolicy" not in job.printed


def test_a_mistake_in_the_settings_reserves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work", modell={"dim": 18})
    job = cluster.submit(folder, "--processes=2")
    assert job.wait() == 1
    assert "failed with exit code 2" in job.printed
    assert "modell" in job.printed
    assert "training worker group" not in job.printed


def test_a_cluster_that_is_too_small_is_not_awaited_for_ever(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "work")
    job = cluster.submit(folder, "--processes=3", "--patience=15")
    assert job.wait() == 1
    assert "waiting for 3 x {'CPU': 1}; the cluster has" in job.printed
    assert "there was no room for 3 x {'CPU': 1} in 15 seconds" in job.printed
