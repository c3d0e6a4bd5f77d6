"""A cluster on this machine that nothing outside can reach: namespaces of Linux with `lo` as their only network.

Each node has an address, a host name and processes of its own, which all end when the node is lost. Files are shared.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

LONGEST = 400
"""Seconds that a cluster may take for one thing on a busy machine."""

NODE = ["unshare", "--pid", "--uts", "--mount", "--mount-proc", "--fork", "--kill-child"]
MACHINE = [*NODE, "--net", "--ipc"]

# the end of standard input ends the first process of a namespace, and the kernel kills all the others with it
UNTIL_LOST = "echo ready; cat > /dev/null"


def missing_namespaces() -> str:
    """What keeps this machine from having isolated nodes, in one sentence; empty if nothing does."""
    if sys.platform != "linux" or any(shutil.which(name) is None for name in ("unshare", "nsenter", "ip")):
        return "needs Linux with unshare, nsenter and ip: apt-get install util-linux iproute2"
    if subprocess.run([*MACHINE, "true"], capture_output=True).returncode:
        return "needs the right to make namespaces: run as root, outside of containers that forbid it"
    return ""


def wait_for(condition: Callable[[], object], what: str) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < LONGEST, f"waited in vain for {what}"
        time.sleep(0.2)


class NodeFailed(Exception):
    """A node whose first command has failed."""


class Node:
    """A namespace with processes; `lose` ends them all at once, as a machine that loses its power."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        wait_for(lambda: self._process.poll() is not None or b"ready\n" in log.read_bytes(), f"{log.name}")
        if self.is_lost:
            raise NodeFailed(log.read_text())

    @property
    def first_process(self) -> int:
        """The id, outside, of the first process of the namespace."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    @property
    def is_lost(self) -> bool:
        return self._process.poll() is not None

    def lose(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LONGEST)


class IsolatedMachine:
    """The namespaces of a cluster: `head` with its address 10.77.0.1, and nodes of any names."""

    def __init__(self, folder: Path, nodes: list[str], environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._nodes: list[Node] = []
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(["head", *nodes], start=1)}
        names = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        lines = ["set -e", f"mount --bind {folder}/hosts /etc/hosts", "hostname head", "ip link set lo up"]
        lines += [f"ip address add {address}/32 dev lo" for address in self.addresses.values()]
        script = "\n".join([*lines, UNTIL_LOST])
        self._machine = Node([*MACHINE, "bash", "-c", script], folder / "machine.log", self._environment)

    def _inside(self, command: list[str], folder: Path) -> list[str]:
        spaces = ["--net", "--mount", "--pid", "--uts", "--ipc"]
        return ["nsenter", "--target", str(self._machine.first_process), *spaces, f"--wd={folder}", *command]

    def run(self, *command: str, folder: Path | None = None, check: bool = True) -> str:
        """What a command prints on the head."""
        place = self._inside(list(command), folder or self._folder)
        done = subprocess.run(place, env=self._environment, capture_output=True, text=True, timeout=LONGEST)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, command: list[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """A command on the head that prints to a file."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self._inside(command, folder), env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )

    def start_node(self, name: str, daemon: str) -> Node:
        """A node with the processes that `daemon` starts in the background."""
        script = f"set -e\nhostname {name}\n{daemon}\n{UNTIL_LOST}"
        command = self._inside([*NODE, "bash", "-c", script], self._folder)
        node = Node(command, self._folder / f"{name}.log", self._environment)
        self._nodes.append(node)
        return node

    def close(self) -> None:
        for node in [*self._nodes, self._machine]:
            node.lose()


@contextmanager
def isolated_machine(folder: Path, nodes: list[str], environment: Mapping[str, str]) -> Iterator[IsolatedMachine]:
    machine = IsolatedMachine(folder, nodes, {**os.environ, "OMP_NUM_THREADS": "1", **environment})
    try:
        yield machine
    finally:
        machine.close()
