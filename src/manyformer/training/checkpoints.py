"""The checkpoints of a run, folders `checkpoints/step-NNNNNNNN`: the complete state is written and restored exactly.

`CheckpointStore` writes folders atomically, verifies and removes them; `CheckpointWriter` fills and reads them."""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import make_folder, remove_drafts, report_disk_full, sync_folder
from manyformer.base.files.json_records import Count, DamagedFile, FileRecord
from manyformer.base.files.verified_folder import VerifiedFolder, write_manifest
from manyformer.data.batching.epochs import FeedPosition, TrainingFeed
from manyformer.training.engine import LossScale, TrainingEngine
from manyformer.training.process_group import SINGLE_PROCESS_GROUP, ProcessGroup
from manyformer.training.process_state import GeneratorStates, read_carried_state, seed_everything, write_carried_state
from manyformer.training.train_state import TrainState

STATE_FILE = "state.json"
_STEP_PREFIX = "step-"
_DAMAGED_PREFIX = "damaged-"
_GENERATOR_FILE = re.compile(r"generators-\d+\.json")


class CheckpointState(FileRecord):
    """Everything in a checkpoint that is not a tensor, except the states of random generators."""

    title = "the state of a checkpoint"
    step: Count
    train_state: TrainState
    data: FeedPosition
    loss_scale: LossScale | None = None
    """In a run in float16, the scale of the loss that its next step uses."""
    has_average: bool = False
    """Whether the weights have a moving average."""


class Checkpoint(NamedTuple):
    """A checkpoint on disk, compared with its manifest."""

    step: int
    folder: Path
    state: CheckpointState


class CheckpointStore:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: Path, process_group: ProcessGroup = SINGLE_PROCESS_GROUP) -> None:
        self.folder = folder
        self.process_group = process_group

    def path(self, step: int) -> Path:
        return self.folder / f"{_STEP_PREFIX}{step:08d}"

    def steps(self) -> list[int]:
        """The steps with a checkpoint, intact or damaged, in ascending order."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix(_STEP_PREFIX) for path in self.folder.glob(f"{_STEP_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdigit())

    @contextmanager
    def draft_folder(self, step: int) -> Iterator[Path]:
        """A new folder that becomes the checkpoint of `step` when the block succeeds and is removed when it fails.

        All processes enter it together. An earlier checkpoint of that step is removed when the new one is complete.
        Raises DiskFull if the disk is full; earlier checkpoints are not touched.
        """
        final = self.path(step)
        draft = self.folder / f".{final.name}.part"
        with report_disk_full(f"the checkpoint of step {step} in {self.folder}"):
            try:
                with self.process_group.raise_together():
                    if self.process_group.is_main_process:
                        shutil.rmtree(draft, ignore_errors=True)
                        make_folder(draft)
                with self.process_group.raise_together():
                    # all processes write their parts, or none of the folder is kept
                    yield draft
                with self.process_group.raise_together():
                    if self.process_group.is_main_process:
                        write_manifest(draft)
                        # the same step with another evaluation: see `TrainingLoop.checkpoint`
                        if final.exists():
                            self._remove(step)
                        os.rename(draft, final)
                        sync_folder(self.folder)
            # also after Ctrl-C: no part of a checkpoint stays
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise

    def newest(self, log: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint, None if there are no checkpoints; damaged ones are logged and skipped.

        Raises UserError if there are checkpoints and all of them are damaged.
        """
        step = -1
        with self.process_group.raise_together():
            if self.process_group.is_main_process:
                step = self._newest(log)
        # one process decides: others may see the files of a network disk later
        step = int(self.process_group.broadcast_from_main(step))
        if step < 0:
            return None
        return Checkpoint(step, self.path(step), self._read_state(step))

    def find(self, step: int | None) -> Checkpoint:
        """The checkpoint of a step, or the newest intact one, of a run whose folder is only read.

        Raises UserError where there is none that is intact."""
        chosen = -1
        with self.process_group.raise_together():
            if self.process_group.is_main_process:
                chosen = self._find(step)
        chosen = int(self.process_group.broadcast_from_main(chosen))
        return Checkpoint(chosen, self.path(chosen), self._read_state(chosen))

    def _find(self, step: int | None) -> int:
        damages = list[str]()
        for candidate in reversed(self.steps() if step is None else [step]):
            damage = self._find_damage(candidate)
            if damage is None:
                return candidate
            damages.append(damage)
        raise UserError("; ".join(damages) or f"{self.folder} holds no checkpoint")

    def is_intact(self, step: int, log: Callable[[str], None]) -> bool:
        """Whether the checkpoint of a step is as it was written; a damaged one is logged and set aside."""
        damage: str | None = None
        with self.process_group.raise_together():
            if self.process_group.is_main_process and (damage := self._find_damage(step)):
                log(damage)
                self._set_aside([step])
        return not self.process_group.any_process(damage)

    def _newest(self, log: Callable[[str], None]) -> int:
        if self.folder.is_dir():
            remove_drafts(self.folder)
        steps = self.steps()
        damages = list[str]()
        for step in reversed(steps):
            damage = self._find_damage(step)
            if damage is None:
                if damages:
                    self._set_aside(later for later in steps if later > step)
                    log(f"{'; '.join(damages)}. Resuming from step {step}, the newest intact checkpoint")
                return step
            damages.append(damage)
        if steps:
            raise UserError(f"{'; '.join(damages)}. No intact checkpoint is left: start over with fresh=true")
        return -1

    def _find_damage(self, step: int) -> str | None:
        """What is wrong with the first damaged file of a checkpoint, None if it is as it was written."""
        try:
            VerifiedFolder.open(self.path(step)).verify()
            self._read_state(step)
        except UserError as damage:
            return str(damage)
        return None

    def _read_state(self, step: int) -> CheckpointState:
        file = self.path(step) / STATE_FILE
        state = CheckpointState.read(file)
        if not state.step == state.train_state.step == step:
            raise DamagedFile(f"{file} is damaged: it is the state of step {state.step}, not of step {step}")
        return state

    def _set_aside(self, steps: Iterable[int]) -> None:
        """Rename damaged checkpoints so that their steps can be written again; `remove_except` deletes them later."""
        for step in steps:
            damaged = self.folder / f"{_DAMAGED_PREFIX}{self.path(step).name}"
            shutil.rmtree(damaged, ignore_errors=True)
            if self.path(step).exists():
                os.rename(self.path(step), damaged)

    def remove_except(self, retained: set[int]) -> None:
        """Remove damaged checkpoints and those whose step is not in `retained`."""
        with self.process_group.raise_together():
            if not self.process_group.is_main_process:
                return
            for damaged in self.folder.glob(f"{_DAMAGED_PREFIX}*"):
                shutil.rmtree(damaged, ignore_errors=True)
            for step in set(self.steps()) - retained:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # renamed first: a kill must not leave a folder that is named like a checkpoint and lacks files
        discarded = self.folder / f".{self.path(step).name}.old.part"
        os.rename(self.path(step), discarded)
        shutil.rmtree(discarded, ignore_errors=True)


def find_branch(path: str, out: Path, process_group: ProcessGroup) -> Checkpoint:
    """The checkpoint that `branch_from` names: of a run the newest, or one by its folder. Raises UserError."""
    folder = Path(path)
    step = None
    if folder.name.startswith(_STEP_PREFIX) and folder.name.removeprefix(_STEP_PREFIX).isdigit():
        step = int(folder.name.removeprefix(_STEP_PREFIX))
        folder = folder.parent.parent
    if folder.resolve() == out.resolve():
        raise UserError(f"branch_from: {path} is the folder of this run itself; set out=FOLDER to another one")
    try:
        return CheckpointStore(folder / "checkpoints", process_group).find(step)
    except UserError as error:
        remedy = "give the folder of a run, or one of its checkpoints as RUN/checkpoints/step-00000800"
        raise UserError(f"branch_from: {error}; {remedy}") from error


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
            has_average=self.engine.average is not None,
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
        self.engine.read(checkpoint.folder, has_average=checkpoint.state.has_average)
        if checkpoint.state.has_average != (self.engine.average is not None):
            change = "the moving average of the weights ends here: this run has none (ema.beta)"
            if self.engine.average is not None:
                change = "the moving average of the weights begins here: the checkpoint has none"
            self.log(change)
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
        # every process of a run writes one file of generators
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
