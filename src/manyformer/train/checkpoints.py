"""The checkpoint folders `checkpoints/step-NNNNNNNN` of a run: write atomically, verify, retain and remove."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.errors import UserError
from manyformer.train.durable_files import find_damage, remove_drafts, report_disk_full, sync_folder, write_manifest
from manyformer.train.process_group import SINGLE_PROCESS_GROUP, ProcessGroup

STATE_FILE = "state.json"
_STEP_PREFIX = "step-"
_DAMAGED_PREFIX = "damaged-"


class Checkpoint(NamedTuple):
    """A checkpoint on disk; `state` is everything that is not a tensor."""

    step: int
    folder: Path
    state: dict[str, Any]


class CheckpointStore:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: Path, process_group: ProcessGroup = SINGLE_PROCESS_GROUP) -> None:
        self.folder, self.process_group = folder, process_group

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

        All processes enter it together. No checkpoint of that step may exist: a folder cannot be replaced atomically.
        Raises DiskFull if the disk is full; earlier checkpoints are not touched.
        """
        final = self.path(step)
        draft = self.folder / f".{final.name}.part"
        with report_disk_full(f"the checkpoint of step {step} in {self.folder}"):
            try:
                with self.process_group.raise_together():
                    if self.process_group.is_main_process:
                        shutil.rmtree(draft, ignore_errors=True)
                        draft.mkdir(parents=True)
                with self.process_group.raise_together():
                    yield draft
                with self.process_group.raise_together():
                    if self.process_group.is_main_process:
                        write_manifest(draft)
                        os.rename(draft, final)
                        sync_folder(self.folder)
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
        step = int(self.process_group.broadcast_from_main(step))
        if step < 0:
            return None
        state = json.loads((self.path(step) / STATE_FILE).read_text(encoding="utf-8"))
        return Checkpoint(int(state["step"]), self.path(step), state)

    def _newest(self, log: Callable[[str], None]) -> int:
        if self.folder.is_dir():
            remove_drafts(self.folder)
        steps = self.steps()
        faults: list[str] = []
        for step in reversed(steps):
            folder = self.path(step)
            fault = find_damage(folder)
            if fault is None:
                if faults:
                    self._rename_damaged(newest_intact=step)
                    log(f"{'; '.join(faults)}. Resuming from step {step}, the newest intact checkpoint")
                return step
            faults.append(f"the checkpoint {folder} is damaged: {fault}")
        if steps:
            raise UserError(f"{'; '.join(faults)}. No intact checkpoint is left: start over with fresh=true")
        return -1

    def _rename_damaged(self, *, newest_intact: int) -> None:
        """Rename damaged checkpoints so that their steps can be written again; `remove_except` deletes them later."""
        for step in self.steps():
            if step > newest_intact:
                damaged = self.folder / f"{_DAMAGED_PREFIX}{self.path(step).name}"
                shutil.rmtree(damaged, ignore_errors=True)
                os.rename(self.path(step), damaged)

    def remove_except(self, retained: set[int]) -> None:
        """Remove damaged checkpoints and those whose step is not in `retained`."""
        with self.process_group.raise_together():
            if not self.process_group.is_main_process:
                return
            for damaged in self.folder.glob(f"{_DAMAGED_PREFIX}*"):
                shutil.rmtree(damaged, ignore_errors=True)
            for step in set(self.steps()) - retained:
                # renamed first: a kill must not leave a folder that is named like a checkpoint and lacks files
                discarded = self.folder / f".{self.path(step).name}.part"
                os.rename(self.path(step), discarded)
                shutil.rmtree(discarded, ignore_errors=True)
