"""What a model remembers of its rows, in a checkpoint: a file of plain tensors for each process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from manyformer.core import State
from manyformer.models.carried_state import CarriedState
from manyformer.models.language_model import LanguageModel
from manyformer.train.process_group import ProcessGroup


def write_memory(memory: CarriedState, folder: Path, world: ProcessGroup) -> None:
    """The memory of our rows, where there is one."""
    if memory.state is not None:
        write_state(memory, _file(folder, world))


def read_memory(memory: CarriedState, folder: Path, world: ProcessGroup) -> bool:
    """Remember what was written, and say whether it could be: rows lie elsewhere on another number of processes."""
    file = _file(folder, world)
    if not memory.on or not file.exists():
        return not memory.on
    memory.model.train()
    read_state(memory, file)
    return True


def write_state(memory: CarriedState, file: Path) -> None:
    """What is remembered now, as plain tensors."""
    found = list(_leaves(memory.state))
    tensors = {str(number): leaf.contiguous().clone() for number, leaf in enumerate(found) if isinstance(leaf, Tensor)}
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in found]
    save_file(tensors, file, metadata={"rest": json.dumps(rest), "rows": str(memory.rows)})


def read_state(memory: CarriedState, file: Path) -> None:
    """Remember what was written of a model in the same mode: training and evaluation may keep other things."""
    assert isinstance(memory.model, LanguageModel)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
        rest, rows = json.loads(about["rest"]), int(about["rows"])
        there = set(opened.keys())
        # a copy: see `restore_state`
        device = memory.model.device
        leaves = [
            opened.get_tensor(str(number)).to(device, copy=True) if str(number) in there else plain
            for number, plain in enumerate(rest)
        ]
    memory.rows, memory.state = rows, _filled(memory.model.init_state(rows), iter(leaves))


def _file(folder: Path, world: ProcessGroup) -> Path:
    return folder / f"memory-{world.rank}-of-{world.size}.safetensors"


def _leaves(state: State) -> Iterator[Any]:
    """Everything that is not a container, in order."""
    if isinstance(state, list | tuple):
        for part in state:
            yield from _leaves(part)
    elif isinstance(state, dict):
        for part in state.values():
            yield from _leaves(part)
    else:
        yield state


def _filled(state: State, leaves: Iterator[Any]) -> State:
    """A state built like this one, with other leaves."""
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_filled(part, leaves) for part in state))
    if isinstance(state, list | tuple):
        return type(state)(_filled(part, leaves) for part in state)
    if isinstance(state, dict):
        return {name: _filled(part, leaves) for name, part in state.items()}
    return next(leaves)
