"""Write the complete state of a run to a checkpoint and restore it exactly."""

import json
from collections.abc import Callable
from typing import NamedTuple

from manyformer.data.sampler import Sampler
from manyformer.train.checkpoints import Checkpoint, CheckpointStore
from manyformer.train.durable_files import write_json
from manyformer.train.engine import TrainingEngine
from manyformer.train.rng import generator_states, restore_generator_states, seed_everything
from manyformer.train.state_checkpoint import read_carried_state, write_carried_state
from manyformer.train.train_state import TrainState


class CheckpointWriter(NamedTuple):
    """Writes and reads weights, optimizer, carried state, data position, random generators and train state."""

    store: CheckpointStore
    engine: TrainingEngine
    feed: Sampler
    log: Callable[[str], None]

    def write(self, train_state: TrainState) -> bool:
        """Write the checkpoint of this step unless it exists; returns whether it was written."""
        if train_state.step in self.store.steps():
            return False
        state = {"step": train_state.step, "train_state": train_state.as_json(), "data": self.feed.state_dict()}
        process_group = self.engine.process_group
        with self.store.draft_folder(train_state.step) as folder:
            self.engine.write(folder)
            write_json(folder / f"generators-{process_group.rank}.json", generator_states())
            write_carried_state(self.engine.carried_state, folder, process_group)
            if process_group.is_main_process:
                write_json(folder / "state.json", state)
        return True

    def read(self, checkpoint: Checkpoint) -> TrainState:
        """Restore the state that this checkpoint was written in, on any number of processes."""
        self.engine.read(checkpoint.folder)
        self.feed.load_state_dict(checkpoint.state["data"])
        process_group = self.engine.process_group
        if not read_carried_state(self.engine.carried_state, checkpoint.folder, process_group):
            self.log("the carried state starts empty: it was written by a different number of processes")
        generator_file = checkpoint.folder / f"generators-{process_group.rank}.json"
        if generator_file.exists():
            restore_generator_states(json.loads(generator_file.read_text(encoding="utf-8")))
        else:
            # written by fewer processes: a seed that no other process and no other step uses
            seed_everything(hash((checkpoint.step, process_group.rank)) % 2**32)
        return TrainState.from_json(checkpoint.state["train_state"])
