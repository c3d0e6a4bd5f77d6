"""`manyformer.train`: a run from its name or record to its final model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from manyformer.config import RunConfig
from manyformer.recipes import get_recipe
from manyformer.train.build_model import choose_device
from manyformer.train.data_protocols import TrainingDataProtocol
from manyformer.train.events import EventListener, TrainingNote, broadcast, silent
from manyformer.train.process_group import ALONE, ProcessGroup, from_environment, joined
from manyformer.train.reporter import LiveReporter, LogFileReporter, reporter
from manyformer.train.run_folder import as_run, locked_folder, move_aside, refuse_foreign
from manyformer.train.session import TrainingSession, TrainResult
from manyformer.train.signals import listening


def train(
    run: RunConfig | str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    fresh: bool = False,
    on_event: EventListener | None = None,
) -> TrainResult:
    """Train what a run describes, or go on where it was interrupted, and save the final model in its folder.

    `run` is a record, a run file, a shipped run's name or a recipe's name, the latter three with overrides such as
    `["depth=4", "limits.steps=500"]`. `fresh` moves an earlier run in the same folder aside and starts over.
    `on_event` is told what happens (manyformer.train.events); None shows it on standard output. Raises UserError where
    something can be mended, `TrainingInterrupted` after Ctrl-C.
    """
    record = as_run(run, overrides)
    tell = reporter() if on_event is None else on_event
    try:
        world = from_environment()
        if world is None and record.devices > 1:
            from manyformer.train.launch import launch

            return launch(record, fresh=fresh, tell=tell)
        return take_part(record, ALONE if world is None else world, fresh=fresh, tell=tell)
    finally:
        if on_event is None and isinstance(tell, LiveReporter):
            tell.close()


def take_part(run: RunConfig, world: ProcessGroup, *, fresh: bool, tell: EventListener) -> TrainResult:
    """One process's part in a run; only the first process of several is heard."""
    assert run.out is not None
    out = Path(run.out)
    device = choose_device(run.device, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined(world, device), listening(patient=world.size > 1) as wish, ExitStack() as held:
        with world.agreed():
            if world.first:
                refuse_foreign(out)
                if fresh and (aside := move_aside(out)):
                    tell(TrainingNote(f"the earlier run is now in {aside}"))
                held.enter_context(locked_folder(out))
                tell = broadcast(tell, LogFileReporter(out / "log.txt"))
        return TrainingSession(run, out, tell if world.first else silent, wish, open_source, world).train()


def open_source(run: RunConfig, out: Path, say: Callable[[str], None]) -> TrainingDataProtocol:
    """The data of a run."""
    from manyformer.data import open_data

    task = get_recipe(run.recipe).card.task
    return open_data(run.data, task, batch_tokens=run.batch.tokens, cache=out / "data", seed=run.seed, say=say)
