"""The folder of a run: its lock, run file and environment record, checks on resuming, and the model of `init_from`."""

import fcntl
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from manyformer.base import VERSION
from manyformer.base.errors import UserError, UserErrors
from manyformer.base.files import SHARED_TOKENIZER
from manyformer.base.files.atomic_files import (
    atomic_write_text,
    make_folder,
    remove_drafts,
    report_disk_full,
    report_not_written,
)
from manyformer.base.files.json_records import read_json
from manyformer.base.files.json_text import json_text
from manyformer.base.keyword_checks import as_json
from manyformer.base.plugins import TASK_GROUP, import_entry_points, import_for_run, plugin_records
from manyformer.config import (
    RUN_FILE,
    CosineSchedule,
    ImportFn,
    InitialModel,
    RecipeLookup,
    RunConfig,
    WSDSchedule,
    describe_misfits,
    differences,
    dump_run,
    load_run,
)
from manyformer.models.model_files import CONFIG_FILE, is_hugging_face, read_spec
from manyformer.models.tasks.masked_language_modelling import CLASSES, HEAD
from manyformer.nn.runtime.devices import gpu_name
from manyformer.recipes import Recipe, get_recipe, modules_to_import, recipe_names
from manyformer.recipes.parts.registry import recipe_of_spec
from manyformer.training.schedules import make_schedule
from manyformer.training.train_state import TrainState, run_progress

RESULT_FILE = "result.json"
ENVIRONMENT_FILE = "env.json"
LOCK_FILE = ".lock"


@contextmanager
def locked_folder(folder: Path, *, activity: str = "trained") -> Iterator[None]:
    """Hold the lock of a run folder while the block runs. Raises UserError if another process holds it.

    `activity` says in the message what that process does. The lock belongs to the operating system and ends with its
    process, so a kill leaves no stale lock.
    """
    make_folder(folder)
    with report_not_written(folder / LOCK_FILE):
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            message = f"{folder} is being {activity} by another process (number {owner}); wait or stop it"
            raise UserError(message) from None
        # the number of a process that has ended may be longer than the own one
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        # nobody else writes here now: what is unfinished was left by a kill
        remove_drafts(folder)
        remove_drafts(folder / "data")
        yield
    finally:
        os.close(handle)


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run and return the new path, None if there is none. The caller holds no lock."""
    if not (folder / RUN_FILE).exists():
        return None
    with locked_folder(folder):
        return rename_aside(folder)


def rename_aside(folder: Path) -> Path:
    """Rename the folder to the first free name with the suffix `.old-NUMBER`, and return the new path."""
    number = 1
    # an earlier run is never deleted
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    with report_not_written(aside):
        return folder.rename(aside)


def check_run_folder(folder: Path) -> None:
    """Raise UserError if the folder contains files but no run file."""
    if not folder.is_dir() or (folder / RUN_FILE).exists():
        return
    file_names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if file_names:
        problem = f"is not a run folder: it contains {file_names[0]} but no {RUN_FILE}"
        raise UserError(f"{folder} {problem}; choose another `out`")


def as_run(target: str | Path) -> RunConfig:
    """The configuration of a run from a name or file; nothing is imported for it."""
    return load_run(target, recipes=recipe_lookup())


def as_training_run(target: RunConfig | str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """The configuration of a run that will be trained, which is a program: the modules that it names are imported."""
    if isinstance(target, RunConfig):
        if overrides:
            remedy = "a RunConfig is changed by run.model_copy(update=...)"
            raise UserError(f"overrides go with a run's name or file; {remedy}")
        imports = import_for_run(target.imports)
        run = target.model_copy(update={"imports": imports, "out": target.out or f"runs/{target.recipe}"})
        _import_file_of(run.recipe, import_for_run)
        # a RunConfig knows no recipe: `load_run` has not compared the two
        misfits = describe_misfits(run.recipe, get_recipe(run.recipe).card.task, run.data.kind, run.evaluate.metric)
        if misfits:
            raise UserErrors(f"{key}: {message}" for key, message in misfits.items())
    else:
        run = load_run(target, overrides, recipes=recipe_lookup(import_for_run))
    # a module that the caller has imported is recorded for the processes of the run
    return run.model_copy(update={"imports": run.imports or modules_to_import(run.recipe)})


def recipe_lookup(import_modules: ImportFn | None = None) -> RecipeLookup:
    """All recipes, as the configuration looks them up, after importing the kinds of data of installed packages."""
    # a kind of data must be known before a run file can name it
    import_entry_points(TASK_GROUP)

    def find(name: str) -> Recipe:
        # when it is needed: the modules of a run may define its recipe
        _import_file_of(name, import_modules)
        return get_recipe(name)

    return RecipeLookup(
        signature_of=lambda name: find(name).signature,
        task_of=lambda name: find(name).card.task,
        names=recipe_names(),
        import_modules=import_modules,
        saved_model=_describe_initial_model,
    )


def _import_file_of(recipe: str, import_modules: ImportFn | None) -> None:
    """Import the file of a recipe FILE.py:NAME, where programs may be imported."""
    file = recipe.rpartition(":")[0]
    if import_modules is not None and file.endswith(".py"):
        import_modules([file], Path())


def _describe_initial_model(path: str, out: str) -> InitialModel | None:
    """The saved model in `path`; where it is gone, what the run in the folder `out` that began with it has recorded."""
    if (saved := describe_saved_model(path)) is not None or not (Path(out) / RUN_FILE).is_file():
        return saved
    recorded = as_run(Path(out) / RUN_FILE)
    if recorded.init_from != path:
        return None
    has_tokenizer = getattr(recorded.data, "tokenizer_of", None) == path
    return InitialModel(path, recorded.recipe, recorded.model, has_tokenizer)


def write_run_file(folder: Path, run: RunConfig, *, state: TrainState | None, log: Callable[[str], None]) -> None:
    """Write the merged run file; `state` is that of the checkpoint in the folder, None without one.

    Raises UserErrors if the checkpoint was trained with other settings.
    """
    file = folder / RUN_FILE
    if state is not None and file.exists():
        previous = as_run(file)
        if changed := differences(previous, run):
            remedy = "restore them, choose another out, or start over with fresh"
            raise UserErrors([f"{folder} was trained with other settings, those of {file}; {remedy}", *changed])
        ends_with_run = isinstance(run.schedule, WSDSchedule) or (
            isinstance(run.schedule, CosineSchedule) and run.schedule.steps is None
        )
        if previous.limits != run.limits and ends_with_run:
            log(_describe_new_course(previous, run, state))
    with report_disk_full(f"the run file {file}"):
        atomic_write_text(file, dump_run(run))


def _describe_new_course(previous: RunConfig, run: RunConfig, state: TrainState) -> str:
    """What other limits do to a learning rate that falls to the end of the run, where the run goes on."""
    old_rate, new_rate = (
        make_schedule(config, width=None, branch=state.branch)(state.step + 1, run_progress(config, state))
        for config in (previous, run)
    )
    if f"{old_rate:.3g}" == f"{new_rate:.3g}":
        course = f"stays at {old_rate:.3g}"
    else:
        course = f"{'rises' if new_rate > old_rate else 'falls'} from {old_rate:.3g} to {new_rate:.3g}"
    return (
        "the limits have changed, so the learning rate schedule now ends at another step: "
        f"the learning rate {course} at step {state.step + 1}"
    )


def write_environment(folder: Path, device: torch.device, *, has_checkpoint: bool, log: Callable[[str], None]) -> None:
    """Write what a result may depend on besides the run; the log is told if a run is resumed in another folder."""
    file = folder / ENVIRONMENT_FILE
    place = str(folder.resolve())
    previous = _previous_place(file)
    if has_checkpoint and previous not in (None, place):
        log(
            f"this run was in {previous} and is now in {place}; it goes on here, with its own checkpoints and prepared "
            "data, and paths of data that are relative are those of the folder where the command is given"
        )
    # where the run is now, by which a later command notices a move
    info = {**collect_environment(device), "folder": place}
    atomic_write_text(file, json_text(info, indent=2, ensure_ascii=True) + "\n")


def _previous_place(file: Path) -> str | None:
    """The folder that a run was last trained in, None where that is unknown."""
    try:
        info = read_json(file, "the environment of a run")
    except UserError:
        return None
    if isinstance(info, dict) and isinstance(info.get("folder"), str):
        return str(info["folder"])
    return None


def collect_environment(device: torch.device) -> dict[str, Any]:
    """Collect what a result may depend on besides the run: versions, processor, threads."""
    import numpy

    info = {
        "manyformer": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "command": sys.argv,
        "plugins": [record._asdict() for record in plugin_records()],
    }
    if (name := gpu_name(device)) is not None:
        info["gpu"] = name
        info["cuda"] = torch.version.cuda
        info["rocm"] = torch.version.hip
    return info


def model_folder(path: str | Path) -> Path:
    """The folder of a saved model, or that of the final model of the run in the folder `path`."""
    folder = Path(path)
    if (folder / "model").is_dir():
        return folder / "model"
    return folder


def describe_saved_model(path: str) -> InitialModel | None:
    """The saved model in the folder `path`, or of the run in it; None where there is none that could be loaded.

    Raises DamagedFile."""
    folder = model_folder(path)
    if not (folder / CONFIG_FILE).is_file() or is_hugging_face(folder):
        return None
    spec = read_spec(folder)
    if spec.recipe not in recipe_names():
        return None
    _, saved_keywords = recipe_of_spec(spec, folder)
    # the data decides the head
    keywords = {name: as_json(value) for name, value in saved_keywords.items() if name not in (HEAD, CLASSES)}
    return InitialModel(path, spec.recipe, keywords, (folder / SHARED_TOKENIZER).is_file())
