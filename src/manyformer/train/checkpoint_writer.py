"""From a run in memory to a checkpoint, and back, exactly."""

import json
from collections.abc import Callable
from typing import NamedTuple

from manyformer.train.checkpoints import Checkpoint, CheckpointStore
from manyformer.train.data_protocols import TrainingFeed
from manyformer.train.durable_files import write_json
from manyformer.train.engine import TrainingEngine
from manyformer.train.rng import generators, restore_generators, seed_everything
from manyformer.train.state_checkpoint import read_memory, write_memory
from manyformer.train.train_state import TrainState


class CheckpointWriter(NamedTuple):
    """All that a checkpoint keeps besides the standing, and where it goes."""

    store: CheckpointStore
    engine: TrainingEngine
    feed: TrainingFeed
    tell: Callable[[str], None]

    def write(self, standing: TrainState) -> bool:
        """Write the checkpoint of this step unless it is there; whether it was written."""
        if standing.step in self.store.steps():
            return False
        state = {"step": standing.step, "standing": standing.as_json(), "data": self.feed.state_dict()}
        world = self.engine.world
        with self.store.writing(standing.step) as folder:
            self.engine.write(folder)
            write_json(folder / f"generators-{world.rank}.json", generators())
            write_memory(self.engine.memory, folder, world)
            if world.first:
                write_json(folder / "state.json", state)
        return True

    def read(self, checkpoint: Checkpoint) -> TrainState:
        """Put everything back as it was when this checkpoint was written, on however many processes."""
        self.engine.read(checkpoint.folder)
        self.feed.load_state_dict(checkpoint.state["data"])
        world = self.engine.world
        if not read_memory(self.engine.memory, checkpoint.folder, world):
            self.tell("the memory of earlier batches begins empty: it was written by another number of processes")
        ours = checkpoint.folder / f"generators-{world.rank}.json"
        if ours.exists():
            restore_generators(json.loads(ours.read_text(encoding="utf-8")))
        else:
            # there were fewer processes then: numbers that no other process and no other step has drawn
            seed_everything(hash((checkpoint.step, world.rank)) % 2**32)
        return TrainState.from_json(checkpoint.state["standing"])
