"""The checkpoints of a run: whole folders `checkpoints/step-NNNNNNNN`, found, checked, kept and removed."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.errors import UserError
from manyformer.train.durable_files import find_damage, remove_drafts, room_for, sync_folder, write_manifest
from manyformer.train.process_group import ALONE, ProcessGroup

STATE = "state.json"
_PREFIX = "step-"
_DAMAGED = "damaged-"


class Checkpoint(NamedTuple):
    """A checkpoint on the disk; `state` is everything that is not a tensor."""

    step: int
    folder: Path
    state: dict[str, Any]


class CheckpointStore:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: Path, world: ProcessGroup = ALONE) -> None:
        self.folder, self.world = folder, world

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:08d}"

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, whole or damaged, in order."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdigit())

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A new folder that becomes the checkpoint of `step` when the block ends well, and vanishes when it does not.

        All processes come through it together. There must be none of that step: replacing a folder cannot be done in
        one stroke. Raises DiskFull where there is no room; earlier checkpoints stay as they are.
        """
        final = self.path(step)
        draft = self.folder / f".{final.name}.part"
        with room_for(f"the checkpoint of step {step} in {self.folder}"):
            try:
                with self.world.agreed():
                    if self.world.first:
                        shutil.rmtree(draft, ignore_errors=True)
                        draft.mkdir(parents=True)
                with self.world.agreed():
                    yield draft
                with self.world.agreed():
                    if self.world.first:
                        write_manifest(draft)
                        os.rename(draft, final)
                        sync_folder(self.folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise

    def newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, None where there is none at all; damaged ones are told and passed over.

        Raises UserError where there are checkpoints and all of them are damaged.
        """
        step = -1
        with self.world.agreed():
            if self.world.first:
                step = self._newest(tell)
        step = int(self.world.of_first(step))
        return None if step < 0 else read(self.path(step))

    def _newest(self, tell: Callable[[str], None]) -> int:
        if self.folder.is_dir():
            remove_drafts(self.folder)
        steps = self.steps()
        faults: list[str] = []
        for step in reversed(steps):
            folder = self.path(step)
            fault = find_damage(folder)
            if fault is None:
                if faults:
                    self._set_aside(newer=step)
                    tell(f"{'; '.join(faults)}. Going on from step {step}, the newest whole checkpoint")
                return step
            faults.append(f"the checkpoint {folder} is damaged: {fault}")
        if steps:
            raise UserError(f"{'; '.join(faults)}. No whole one is left: start over with fresh=true")
        return -1

    def _set_aside(self, *, newer: int) -> None:
        """Rename damaged checkpoints, so that their steps are free; the next `keep` removes them."""
        for step in self.steps():
            if step > newer:
                aside = self.folder / f"{_DAMAGED}{self.path(step).name}"
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.path(step), aside)

    def keep(self, wanted: set[int]) -> None:
        """Remove the checkpoints of all other steps, and damaged ones."""
        with self.world.agreed():
            if self.world.first:
                self._keep(wanted)

    def _keep(self, wanted: set[int]) -> None:
        for aside in self.folder.glob(f"{_DAMAGED}*"):
            shutil.rmtree(aside, ignore_errors=True)
        for step in self.steps():
            if step not in wanted:
                # renamed first: a kill must not leave a folder that looks like a checkpoint and lacks files
                gone = self.folder / f".{self.path(step).name}.part"
                os.rename(self.path(step), gone)
                shutil.rmtree(gone, ignore_errors=True)


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder that has been found whole."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return Checkpoint(int(state["step"]), folder, state)
