"""`manyformer.train`: a run from its name or record to its final model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyformer.config import Run
from manyformer.recipes import get
from manyformer.train.events import Listener, Note, several
from manyformer.train.folder import as_run, locked, refuse_foreign, set_aside
from manyformer.train.reporter import LogFile, reporter
from manyformer.train.session import Session, TrainResult
from manyformer.train.signals import listening
from manyformer.train.source import Source


def train(
    run: Run | str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    fresh: bool = False,
    on_event: Listener | None = None,
) -> TrainResult:
    """Train what a run describes, or go on where it was interrupted, and save the final model in its folder.

    `run` is a record, a run file, a shipped run's name or a recipe's name, the latter three with overrides such as
    `["depth=4", "limits.steps=500"]`. `fresh` moves an earlier run in the same folder aside and starts over.
    `on_event` is told what happens (manyformer.train.events); None shows it on standard output. Raises UserError where
    something can be mended, `Interrupted` after Ctrl-C.
    """
    record = as_run(run, overrides)
    assert record.out is not None
    out = Path(record.out)
    tell = reporter() if on_event is None else on_event
    refuse_foreign(out)
    if fresh and (aside := set_aside(out)):
        tell(Note(f"the earlier run is now in {aside}"))
    with locked(out), listening() as wish:
        return Session(record, out, several(tell, LogFile(out / "log.txt")), wish, open_source).train()


def open_source(run: Run, out: Path, say: Callable[[str], None]) -> Source:
    """The data of a run."""
    from manyformer.data import open_data

    task = get(run.recipe).card.task
    return open_data(run.data, task, batch_tokens=run.batch.tokens, cache=out / "data", seed=run.seed, say=say)
