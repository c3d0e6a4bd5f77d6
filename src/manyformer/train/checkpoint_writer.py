"""Write the complete state of a run to a checkpoint and restore it exactly."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

from manyformer.data.epochs import TrainingFeed
from manyformer.files.json_records import DamagedFile
from manyformer.files.verified_folder import VerifiedFolder
from manyformer.train.checkpoints import STATE_FILE, Checkpoint, CheckpointState, CheckpointStore
from manyformer.train.engine import TrainingEngine
from manyformer.train.rng import GeneratorStates, seed_everything
from manyformer.train.state_checkpoint import read_carried_state, write_carried_state
from manyformer.train.train_state import TrainState

_GENERATOR_FILE = re.compile(r"generators-\d+\.json")


class CheckpointWriter(NamedTuple):
    """Writes and reads weights, optimizer, carried state, data position, random generators and train state."""

    store: CheckpointStore
    engine: TrainingEngine
    feed: TrainingFeed
    log: Callable[[str], None]

    def write(self, train_state: TrainState) -> None:
        """Write the checkpoint of this step, in the place of an earlier one."""
        scaler = self.engine.loss_scaler
        state = CheckpointState(
            step=train_state.step,
            train_state=train_state,
            data=self.feed.state_dict(),
            loss_scale=None if scaler is None else scaler.state,
        )
        process_group = self.engine.process_group
        with self.store.draft_folder(train_state.step) as folder:
            self.engine.write(folder)
            GeneratorStates.of_process().write(folder / _generator_file(process_group.rank))
            write_carried_state(self.engine.carried_state, folder, process_group)
            if process_group.is_main_process:
                self.feed.write_files(folder)
                state.write(folder / STATE_FILE)

    def read(self, checkpoint: Checkpoint) -> TrainState:
        """Restore the state that this checkpoint was written in, on any number of processes."""
        self.engine.read(checkpoint.folder)
        if self.engine.loss_scaler is not None and checkpoint.state.loss_scale is not None:
            self.engine.loss_scaler.state = checkpoint.state.loss_scale
        self.feed.load_state_dict(checkpoint.state.data)
        process_group = self.engine.process_group
        if not read_carried_state(self.engine.carried_state, checkpoint.folder, process_group):
            self.log("the carried state starts empty: it was written by a different number of processes")
        files = VerifiedFolder.open(checkpoint.folder)
        generator_file = _generator_file(process_group.rank)
        self.feed.read_files(files)
        self._report_other_size(files)
        if generator_file in files:
            _restore_generators(files.file(generator_file))
        else:
            # written by fewer processes: a seed that no other process and no other step uses
            seed_everything(hash((checkpoint.step, process_group.rank)) % 2**32)
        return deepcopy(checkpoint.state.train_state)

    def _report_other_size(self, files: VerifiedFolder) -> None:
        """Say if the checkpoint was written by another number of processes: the losses will differ."""
        written_by = sum(_GENERATOR_FILE.fullmatch(name) is not None for name in files.sums)
        size = self.engine.process_group.size
        if written_by == size:
            return
        parts = self.engine.strategy.data_group.size
        rows = "the rows of a batch"
        if parts != 1:
            rows = f"1/{parts} of the rows of a batch"
        self.log(
            f"the checkpoint was written by {_count_processes(written_by)}, and this run has {_count_processes(size)}: "
            f"each computes {rows} and draws random numbers of its own, so that dropout and with it the losses differ "
            "from those of a run with as many processes as before"
        )


def _count_processes(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"


def _generator_file(rank: int) -> str:
    return f"generators-{rank}.json"


def _restore_generators(file: Path) -> None:
    states = GeneratorStates.read(file)
    try:
        states.restore()
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DamagedFile(f"{file} is damaged: these are no states of random generators ({error})") from error
