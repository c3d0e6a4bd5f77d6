"""The folder of a run: one process at a time, the merged run file, the environment, and what is asked of it again."""

import fcntl
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from manyformer.config import RUN_FILE, CosineSchedule, RunConfig, differences, dump_run, load_run
from manyformer.errors import UserError, UserErrors
from manyformer.recipes import RECIPES, get_recipe
from manyformer.train.durable_files import remove_drafts, replace_text, room_for

RESULT_FILE = "result.json"
LOCK = ".lock"


@contextmanager
def locked_folder(folder: Path, *, doing: str = "trained") -> Iterator[None]:
    """The folder is ours while the block runs. Raises UserError where another process has it, `doing` the same.

    The lock is the system's own: it goes with its process, so that nothing is left after a kill.
    """
    with room_for(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise UserError(f"{folder} is being {doing} by another process (number {owner}); wait or stop it") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        remove_drafts(folder)
        yield
    finally:
        os.close(handle)


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run out of the way; None where there is none. The caller holds no lock in it."""
    if not (folder / RUN_FILE).exists():
        return None
    with locked_folder(folder):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        os.rename(folder, aside)
    return aside


def refuse_foreign(folder: Path) -> None:
    """Raise UserError where the folder holds files and none of them is a run's."""
    if not folder.is_dir() or (folder / RUN_FILE).exists():
        return
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others:
        raise UserError(f"{folder} is no run's folder: it holds {others[0]} but no {RUN_FILE}; choose another `out`")


def as_run(target: RunConfig | str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """The run that is meant by a record, or by a name or file and overrides."""
    if isinstance(target, RunConfig):
        if overrides:
            raise UserError("overrides go with a run's name or file; a Run is changed by run.model_copy(update=...)")
        return target if target.out else target.model_copy(update={"out": f"runs/{target.recipe}"})
    return load_run(
        target,
        overrides,
        signature_of=lambda name: get_recipe(name).signature,
        task_of=lambda name: get_recipe(name).card.task,
        recipes=RECIPES,
    )


def write_run_file(folder: Path, run: RunConfig, *, begun: bool, tell: Callable[[str], None]) -> None:
    """Write the merged run file. Raises UserErrors where the folder has `begun` training with other settings."""
    file = folder / RUN_FILE
    if begun and file.exists():
        before = as_run(file)
        if changed := differences(before, run):
            first = (
                f"{folder} has begun with other settings; put them back, choose another out, or start over with fresh"
            )
            raise UserErrors([first, *changed])
        if before.limits != run.limits and isinstance(run.schedule, CosineSchedule) and run.schedule.steps is None:
            tell("the limits have changed, so the learning rate falls to another end from here on")
    with room_for(f"the run file {file}"):
        replace_text(file, dump_run(run))


def environment(device: torch.device) -> dict[str, Any]:
    """What a result may depend on besides the run: versions, processor, threads."""
    import numpy

    from manyformer import __version__

    found = {
        "manyformer": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "command": sys.argv,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found


def write_environment(folder: Path, device: torch.device) -> None:
    """env.json of the run."""
    replace_text(folder / "env.json", json.dumps(environment(device), indent=2) + "\n")
