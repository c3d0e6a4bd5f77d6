"""The training in a worker process, with its events and its failure as lines of a pipe."""

import sys
import traceback
from typing import Any

from manyformer.config import RunConfig
from manyformer.errors import UserError
from manyformer.plugins import import_modules
from manyformer.system.stop_signals import resumable
from manyformer.train.event_protocol import WorkerFailure, encode
from manyformer.train.events import TrainingEvent
from manyformer.train.process_group import FailedElsewhere, process_group_from_environment
from manyformer.train.run_folder import as_training_run, recipe_lookup
from manyformer.train.run_training import train_in_process


def train_and_report(settings: dict[str, Any], events: int, *, fresh: bool) -> None:
    """Train a run as one process of its group, and write events to the open file of number `events`."""
    process_group = process_group_from_environment()
    assert process_group is not None, "this process is started by `launch`"
    with open(events, "w", encoding="utf-8", buffering=1) as file:

        def report(event: TrainingEvent | WorkerFailure) -> None:
            print(encode(event), file=file)

        try:
            # kinds of data that other packages define
            recipe_lookup()
            import_modules(settings["import"])
            run = as_training_run(RunConfig.model_validate(settings))
            with resumable():
                train_in_process(
                    run, process_group, fresh=fresh, on_event=lambda event: print(encode(event), file=file)
                )
        except FailedElsewhere:
            sys.exit(1)
        except Exception as error:
            report(WorkerFailure.of(error))
            if not isinstance(error, UserError):
                traceback.print_exc()
            sys.exit(1)
