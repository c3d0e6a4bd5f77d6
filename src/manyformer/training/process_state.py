"""What each process adds to a checkpoint: the states of its random generators, and what its model carries on.

All generators of a process are seeded here too, and its operations made deterministic."""

import base64
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import torch
from pydantic import Base64Bytes, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from manyformer.base.files.atomic_files import atomic_path
from manyformer.base.files.json_records import DamagedFile, FileRecord
from manyformer.base.files.json_text import json_text
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.models.model import CarriedState
from manyformer.nn.runtime.devices import generator_states, restore_generator
from manyformer.nn.runtime.torch_internals import tree_leaves, tree_structure, tree_unflatten
from manyformer.training.process_group import ProcessGroup

MAX_ROWS = 1 << 20
"""The largest number of rows of a state that is read."""


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, including those of all devices."""
    random.seed(seed)
    # NumPy takes seeds of 32 bits
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def deterministic_algorithms(*, on: bool) -> Iterator[None]:
    """Let torch use only operations that repeat their results to the last bit while the block runs, if `on`."""
    if not on:
        yield
        return
    # cuBLAS reads it once, before its first product on a GPU, and repeats its results with a buffer of this size
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous)


class GeneratorStates(FileRecord):
    """The states of all generators of a process."""

    title = "the states of random generators"
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]
    torch: Base64Bytes
    devices: dict[str, Base64Bytes] = Field(default_factory=dict)
    """The state of the current device of each type that draws by a generator of its own."""
    cuda: Base64Bytes | None = Field(default=None, exclude=True)
    """Where version 0.3.0 and older ones have written the only such state."""

    @classmethod
    def of_process(cls) -> Self:
        """The states of the generators of this process."""
        # the legacy form is made of plain numbers, which JSON holds
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return cls(
            python=random.getstate(),
            numpy=(str(kind), tuple(np.asarray(keys).tolist()), int(position), int(has_gauss), float(cached)),
            torch=_encode_state(torch.get_rng_state()),
            devices={device_type: _encode_state(state) for device_type, state in generator_states().items()},
        )

    def restore(self) -> None:
        """Restore the generators of this process. Raises ValueError or TypeError for states of no generator."""
        random.setstate(self.python)
        kind, keys, position, has_gauss, cached = self.numpy
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode_state(self.torch))
        older = {} if self.cuda is None else {"cuda": self.cuda}
        for device_type, state in {**older, **self.devices}.items():
            restore_generator(device_type, _decode_state(state))


def _encode_state(state: torch.Tensor) -> bytes:
    return base64.b64encode(state.numpy().tobytes())


def _decode_state(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8).clone()


def write_carried_state(carried_state: CarriedState, folder: Path, process_group: ProcessGroup) -> None:
    """Write the carried state of this process's rows, if there is one."""
    if carried_state.state is not None:
        write_state_file(carried_state, _state_path(folder, process_group))


def read_carried_state(carried_state: CarriedState, folder: Path, process_group: ProcessGroup) -> bool:
    """Restore the carried state; False if it was written by another number of processes, whose rows differ."""
    files = VerifiedFolder.open(folder)
    name = _state_path(folder, process_group).name
    if not carried_state.enabled or name not in files:
        return not carried_state.enabled
    # the states of training and evaluation may differ in form
    carried_state.model.train()
    read_state_file(carried_state, files.file(name))
    return True


def write_state_file(carried_state: CarriedState, file: Path) -> None:
    """Write the carried state as plain tensors; leaves that are no tensors go into the metadata."""
    leaves = tree_leaves(carried_state.state)
    tensors = {str(number): leaf.contiguous().clone() for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    # numbers such as a position keep their place among the leaves
    plain_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    metadata = {"plain_leaves": json_text(plain_leaves), "rows": str(carried_state.rows)}
    with atomic_path(file) as draft:
        save_file(tensors, draft, metadata=metadata)


def read_state_file(carried_state: CarriedState, file: Path) -> None:
    """Restore a state written in the same mode of the model: states of training and evaluation may differ.

    Raises DamagedFile for a file that holds no state of this model.
    """
    try:
        with safe_open(file, "pt") as handle:
            metadata = handle.metadata()
            plain_leaves = json.loads(metadata["plain_leaves"])
            rows = int(metadata["rows"])
            stored = set(handle.keys())
            # a copy: see `restore_optimizer_state`
            device = carried_state.model.device
            leaves = [
                handle.get_tensor(str(number)).to(device, copy=True) if str(number) in stored else plain
                for number, plain in enumerate(plain_leaves)
            ]
        if not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"{rows} rows")
        initial_state = carried_state.model.init_state(rows)
        for number, (leaf, initial) in enumerate(zip(leaves, tree_leaves(initial_state), strict=True)):
            if isinstance(initial, Tensor) and not (isinstance(leaf, Tensor) and leaf.dim() == initial.dim()):
                raise ValueError(f"part {number} is no tensor of {initial.dim()} dimensions")
        carried_state.rows = rows
        carried_state.state = tree_unflatten(leaves, tree_structure(initial_state))
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFile(f"{file} is damaged: it holds no state of this model ({error})") from error


def _state_path(folder: Path, process_group: ProcessGroup) -> Path:
    return folder / f"memory-{process_group.rank}-of-{process_group.size}.safetensors"
