"""The files of a rollout collector in a checkpoint: plain tensors, and a record of scores."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from manyformer.batches.episode_batches import RolloutBatch
from manyformer.core import State
from manyformer.files.atomic_files import atomic_path
from manyformer.files.json_records import DamagedFile, FileRecord
from manyformer.files.verified_folder import VerifiedFolder
from manyformer.rollouts.acting_loop import PolicyInputs
from manyformer.rollouts.rollout_collector import EpisodeProgress, RolloutCollector, check_scores
from manyformer.torch_internals import tree_leaves, tree_structure, tree_unflatten

TENSOR_FILE = "rollout.safetensors"
SCORE_FILE = "rollout.json"
_ROLLOUT_FIELDS = tuple(name for name in RolloutBatch._fields if name not in ("state", "objective", "layout"))


class RolloutScores(FileRecord):
    """The scores of the latest episodes, and whether a rollout is being learned from."""

    title = "the scores of a rollout"
    scores: dict[str, float]
    has_rollout: bool


def write_collector(collector: RolloutCollector, rollout: RolloutBatch | None, folder: Path) -> None:
    """Write the running episodes, the state of the policy, and the rollout that is being learned from, if any."""
    assert collector.loop.inputs is not None
    arrays = {f"environment.{name}": array for name, array in collector.environment.state_arrays().items()}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    tensors |= {f"input.{name}": part for name, part in collector.loop.inputs._asdict().items()}
    tensors |= {f"progress.{name}": part for name, part in collector.progress._asdict().items()}
    tensors |= _state_tensors("state", collector.state)
    if rollout is not None:
        tensors |= {f"rollout.{name}": getattr(rollout, name) for name in _ROLLOUT_FIELDS}
        tensors |= _state_tensors("rollout_state", rollout.state)
    with atomic_path(folder / TENSOR_FILE) as file:
        save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, file)
    RolloutScores(scores=collector.scores, has_rollout=rollout is not None).write(folder / SCORE_FILE)


def read_collector(collector: RolloutCollector, files: VerifiedFolder) -> RolloutBatch | None:
    """Restore what `write_collector` wrote, and return the rollout. Raises DamagedFile."""
    file = files.file(TENSOR_FILE)
    score_file = files.file(SCORE_FILE)
    record = RolloutScores.read(score_file)
    try:
        with safe_open(file, "pt") as handle:
            # a copy, because the file is mapped into memory
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
        _restore_running(collector, tensors)
        collector.state = _read_state(collector, tensors, "state")
        collector.scores = check_scores(record.scores)
        if record.has_rollout:
            return _read_rollout(collector, tensors)
        return None
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{file} is damaged: it holds no rollout of this run ({error})") from error


def _restore_running(collector: RolloutCollector, tensors: dict[str, Tensor]) -> None:
    """Restore the environment, the inputs of the next step and the sums of the running episodes."""
    environment = collector.environment
    loop = collector.loop
    prefix = "environment."
    arrays = {name.removeprefix(prefix): tensor.numpy() for name, tensor in tensors.items() if name.startswith(prefix)}
    loop.inputs = loop.first_inputs(environment.restore(arrays))
    stored = PolicyInputs(*(tensors[f"input.{name}"] for name in PolicyInputs._fields))
    for name, part, like in zip(PolicyInputs._fields, stored, loop.inputs, strict=True):
        _check_like(name, part, like.shape, like.dtype)
    loop.inputs = stored
    progress = EpisodeProgress(*(tensors[f"progress.{name}"] for name in EpisodeProgress._fields))
    for name, part, like in zip(EpisodeProgress._fields, progress, collector.progress, strict=True):
        _check_like(name, part, like.shape, like.dtype)
    collector.progress = progress


def _read_rollout(collector: RolloutCollector, tensors: dict[str, Tensor]) -> RolloutBatch:
    assert collector.loop.inputs is not None
    inputs = collector.loop.inputs
    steps = collector.settings.steps
    actions = inputs.previous_actions
    like = dict.fromkeys(_ROLLOUT_FIELDS, inputs.previous_rewards)
    like |= {"actions": actions, "previous_actions": actions, "observations": inputs.observations}
    like["segments"] = inputs.segments
    parts: dict[str, Any] = {name: tensors[f"rollout.{name}"] for name in _ROLLOUT_FIELDS}
    for name, part in parts.items():
        rows, *rest = like[name].shape
        _check_like(name, part, torch.Size([rows, steps, *rest]), like[name].dtype)
    state = _read_state(collector, tensors, "rollout_state")
    return RolloutBatch(**parts, state=state, objective=collector.settings.objective)


def _state_tensors(prefix: str, state: object) -> dict[str, Tensor]:
    return {f"{prefix}.{number}": tensor for number, tensor in enumerate(flatten_state(state))}


def _read_state(collector: RolloutCollector, tensors: dict[str, Tensor], prefix: str) -> object:
    template = collector.policy.init_state(collector.environment.rows)
    initial = flatten_state(template)
    parts = [tensors[f"{prefix}.{number}"].to(like.device) for number, like in enumerate(initial)]
    return restore_state(template, parts)


def _check_like(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is no tensor of {dtype} with the shape {tuple(shape)}")


def flatten_state(state: State) -> list[Tensor]:
    """The tensors of a state in order, and a last one with its whole numbers."""
    leaves = tree_leaves(state)
    numbers = [int(leaf) for leaf in leaves if isinstance(leaf, int)]
    return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), torch.tensor(numbers, dtype=torch.long)]


def restore_state(template: State, tensors: list[Tensor]) -> State:
    """The state that `flatten_state` made these tensors of; `template` is one of the same form, such as an initial one.

    Raises ValueError if the number of tensors, their dtypes or their numbers of axes differ from the template's."""
    initial = flatten_state(template)
    forms = [(tensor.dtype, tensor.ndim) for tensor in tensors]
    if forms != [(tensor.dtype, tensor.ndim) for tensor in initial] or len(tensors[-1]) != len(initial[-1]):
        raise ValueError("these tensors are not those of a state of this form")
    remaining = iter(tensors)
    numbers = iter(tensors[-1].tolist())

    def restored(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return next(remaining)
        if isinstance(leaf, int):
            return type(leaf)(next(numbers))
        return leaf

    return tree_unflatten([restored(leaf) for leaf in tree_leaves(template)], tree_structure(template))
