"""Any command where something around it is not as usual: its home, its streams, its folder, what its paths lead to."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fault_injection.forked_commands import LOAD, Surroundings
from fault_injection.outcomes import NotRun, Trial, judge
from fault_injection.verbs import USES, Use
from fault_injection.workshop import Workshop, comparable_output

FAMILY = "environment"
NOBODY = 65_534
UNKNOWN = 54_321

FORKED: dict[str, Surroundings] = {
    "standard input closed": Surroundings(closed=(0,)),
    "TMPDIR missing": Surroundings(environment={"TMPDIR": "/nothing/here", "TEMP": None, "TMP": None}),
    "a terminal of one column": Surroundings(environment={"COLUMNS": "1", "LINES": "1"}),
    "columns that are no number": Surroundings(environment={"COLUMNS": "x"}),
    "umask 077": Surroundings(umask=0o077),
    "umask 777": Surroundings(umask=0o777),
    "the folder removed": Surroundings(without_folder=True),
}
FRESH: dict[str, Surroundings] = {
    "HOME missing": Surroundings(environment={"HOME": "/nothing/here"}, fresh=True),
    "HOME a link to itself": Surroundings(environment={"HOME": "loop"}, fresh=True),
    "HOME a file": Surroundings(environment={"HOME": "/etc/hostname"}, fresh=True),
    "no HOME and a user without a name": Surroundings(environment={"HOME": None}, user=UNKNOWN, fresh=True),
    "HOME that may not be entered": Surroundings(environment={"HOME": "/root"}, user=NOBODY, fresh=True),
    "ASCII output": Surroundings(environment={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}, fresh=True),
    "Latin-1 output": Surroundings(environment={"PYTHONIOENCODING": "latin-1"}, fresh=True),
    "the locale C without UTF-8": Surroundings(
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, fresh=True
    ),
    "standard output closed": Surroundings(closed=(1,), fresh=True),
    "standard output and errors closed": Surroundings(closed=(1, 2), fresh=True),
    "all streams closed": Surroundings(closed=(0, 1, 2), fresh=True),
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    # the name of a socket may have about a hundred bytes
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


PATHS: dict[str, Callable[[Path], object]] = {
    "a pipe without a writer": _pipe,
    "a socket": _socket,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/full": lambda path: path.symlink_to("/dev/full"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "an empty folder": lambda path: path.mkdir(),
    "an empty file": lambda path: path.write_bytes(b""),
    "nothing": lambda path: None,
}


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """One command in odd surroundings, or with one of its paths leading to what is no file."""
    chance = workshop.chance(FAMILY, number)
    if number % 3 == 0:
        uses = [use for use in USES if use.paths]
        use = uses[number // 3 % len(uses)]
        return _odd_path(workshop, number, use, chance.choice(use.paths), chance.choice(sorted(PATHS)))
    kinds = FORKED if number % 3 == 1 else FRESH
    deed = sorted(kinds)[number // 3 % len(kinds)]
    use = chance.choice([use for use in USES if use.command[0] != LOAD])
    user = kinds[deed].user
    if user is not None and not _can_be(user):
        return NotRun(FAMILY, number, "another user cannot be taken: it needs root, and a Python that all may start")
    return _odd_surroundings(workshop, number, use, deed, kinds[deed])


@cache
def _can_be(user: int) -> bool:
    """Whether this process may become that user, who may start this Python and read the sources."""
    if os.getuid() != 0:
        return False
    command = [sys.executable, "-c", "import manyformer"]
    try:
        return not subprocess.run(command, user=user, group=user, extra_groups=[], capture_output=True).returncode
    except OSError:
        return False


def _odd_path(workshop: Workshop, number: int, use: Use, argument: str, deed: str) -> Trial:
    workshop.set_up(use.scenario, finished=use.finished)
    name = argument.rpartition("=")[2]
    path = workshop.here / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    PATHS[deed](path)
    began = time.monotonic()
    result = workshop.run(use.command)
    outcome, detail = judge(result, {name}, same=False)
    return Trial(FAMILY, number, f"{name} is {deed}", outcome, str(result), detail, time.monotonic() - began)


def _odd_surroundings(workshop: Workshop, number: int, use: Use, deed: str, surroundings: Surroundings) -> Trial:
    expected = workshop.undisturbed_output(use.scenario, use.command, finished=use.finished)
    workshop.set_up(use.scenario, finished=use.finished)
    (workshop.here / "loop").symlink_to("loop")
    if surroundings.user is not None:
        _give_away(workshop, surroundings.user)
    began = time.monotonic()
    result = workshop.run(use.command, surroundings)
    if workshop.here.exists():
        shutil.chown(workshop.here, os.getuid())
    # whoever has closed the output wants none
    same = None if 1 in surroundings.closed else is_alike(expected, comparable_output(result.output))
    names = {"TMPDIR", "/nothing/here", "folder", "umask", "denied", "HOME", *use.paths, use.scenario.written}
    outcome, detail = judge(result, names, same=same)
    is_harmless = surroundings.fresh or deed in ("a terminal of one column", "columns that are no number", "umask 077")
    if result.code == 2 and is_harmless:
        outcome, detail = "unnamed", f"it fails, though nothing is wrong: {detail}"
    return Trial(FAMILY, number, deed, outcome, str(result), detail, time.monotonic() - began)


def _give_away(workshop: Workshop, user: int) -> None:
    """Let another user enter and change the folder of the trials."""
    workshop.root.chmod(0o755)
    for path in (workshop.here, *workshop.here.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)


def is_alike(first: str, second: str) -> bool:
    """Whether two outputs in JSON differ by the machine, and by the rounding of numbers, at most.

    A new Python has the threads that the machine allows, which add in another order than the one thread of a fork."""
    if not first or not second:
        return first == second
    return _is_alike(json.loads(first), json.loads(second))


def _is_alike(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        names = {*first, *second} - {"machine"}
        return all(name in first and name in second and _is_alike(first[name], second[name]) for name in names)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_alike, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-5)
    return bool(first == second)
