"""`manyformer.train`: train a run, given by name, file or configuration, to its final model."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from manyformer.config import RunConfig
from manyformer.data import open_data
from manyformer.data.opened import OpenedData
from manyformer.errors import UserError
from manyformer.recipes import get_recipe
from manyformer.system.devices import use_device
from manyformer.system.stop_signals import handle_stop_signals, resumable
from manyformer.train.build_model import choose_device
from manyformer.train.checkpoints import CheckpointStore
from manyformer.train.events import (
    EventListener,
    LiveReporter,
    TrainingNote,
    TrainResult,
    broadcast,
    log_file_reporter,
    reporter,
    silent,
)
from manyformer.train.process_group import (
    SINGLE_PROCESS_GROUP,
    ProcessGroup,
    initialized_process_group,
    name_lost_process,
    process_group_from_environment,
)
from manyformer.train.run_folder import as_training_run, check_run_folder, locked_folder, move_aside
from manyformer.train.session import TrainingSession
from manyformer.type_aliases import LogFn


@resumable()
def train(
    run: RunConfig | str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    fresh: bool = False,
    on_event: EventListener | None = None,
) -> TrainResult:
    """Train a run, or resume it where it was interrupted, and save the final model in its folder.

    `run` is a RunConfig, a run file, a shipped run's name or a recipe's name, the latter three with overrides such as
    `["depth=4", "limits.steps=500"]`. `fresh` renames the folder of an earlier run and starts over. `on_event` receives
    training events (manyformer.train.events); None prints them on standard output. Raises UserError for mistakes that
    the user can correct, `TrainingInterrupted` after Ctrl-C or SIGTERM, and `ProcessFailed` where another of torchrun's
    processes has gone.
    """
    with ExitStack() as resources:
        config = as_training_run(run, overrides)
        listener = reporter() if on_event is None else on_event
        if on_event is None and isinstance(listener, LiveReporter):
            resources.callback(listener.close)
        process_group = process_group_from_environment()
        if process_group is None and config.devices > 1:
            from manyformer.train.launch import launch

            return launch(config, fresh=fresh, on_event=listener)
        if process_group is None:
            return train_in_process(config, SINGLE_PROCESS_GROUP, fresh=fresh, on_event=listener)
        if fresh:
            remedy = f"rename {config.out}, or choose another out"
            raise UserError(f"fresh would start over whenever torchrun starts the processes again; {remedy}")
        with name_lost_process():
            return train_in_process(config, process_group, fresh=False, on_event=listener)


def train_in_process(
    run: RunConfig, process_group: ProcessGroup, *, fresh: bool, on_event: EventListener
) -> TrainResult:
    """Train a run in this process of the group; only the main process reports events."""
    assert run.out is not None
    out = Path(run.out)
    device = choose_device(run.device, process_group)
    use_device(device)
    with (
        initialized_process_group(process_group, device, timeout_minutes=run.process_timeout),
        handle_stop_signals() as stop_signal,
        ExitStack() as resources,
    ):
        with process_group.raise_together():
            if process_group.is_main_process:
                check_run_folder(out)
                if fresh and (moved := move_aside(out)):
                    on_event(TrainingNote(f"the earlier run is now in {moved}"))
                resources.enter_context(locked_folder(out))
                on_event = broadcast(on_event, log_file_reporter(out / "log.txt"))
        return TrainingSession(
            run, out, on_event if process_group.is_main_process else silent, stop_signal, open_run_data, process_group
        ).train()


def open_run_data(run: RunConfig, out: Path, log: LogFn) -> OpenedData:
    """Open the training and validation data of a run."""
    form = get_recipe(run.recipe).card.task.variant(run.data.kind).data_forms[run.data.kind]
    return open_data(
        run.data,
        form,
        batch_tokens=run.batch.tokens,
        cache=out / "data",
        seed=run.seed,
        belongs_to_model=bool(CheckpointStore(out / "checkpoints").steps()),
        log=log,
    )
