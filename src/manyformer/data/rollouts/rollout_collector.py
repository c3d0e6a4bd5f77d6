"""Collects rollouts: a fixed number of steps of all rows of an environment, with advantages and returns.

In a checkpoint a collector is a file of plain tensors, and a record of scores."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from manyformer.base.environments import VectorEnvironment
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_path
from manyformer.base.files.json_records import DamagedFile, FileRecord
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.base.type_aliases import IntArray
from manyformer.data.rollouts.acting_loop import ActedStep, ActingLoop, ActingPolicy, PolicyInputs, sample_actions
from manyformer.nn.batches.episode_batches import ClippedObjective, RolloutBatch
from manyformer.nn.core import State
from manyformer.nn.runtime.torch_internals import tree_leaves, tree_structure, tree_unflatten

EPISODE_SCORES = ("return", "episode_length", "success")
"""The names of the means over episodes."""

ROLLOUT_DIAGNOSTICS = ("entropy", "explained_variance")
"""The names of what a rollout says about its policy: the entropy of its actions in nats, and the share of the variance
of returns that its values explain."""

TENSOR_FILE = "rollout.safetensors"
SCORE_FILE = "rollout.json"
_ROLLOUT_FIELDS = tuple(name for name in RolloutBatch._fields if name not in ("state", "objective", "layout"))


class RolloutSettings(NamedTuple):
    """What a rollout is: the steps of each row, the discount of rewards (gamma), the lambda of advantages, and the
    objective that the policy learns from them with."""

    steps: int
    discount: float
    gae_lambda: float
    objective: ClippedObjective


class EpisodeProgress(NamedTuple):
    """The sums of rewards and the numbers of steps of the running episodes."""

    returns: Float[Tensor, " b"]
    lengths: Float[Tensor, " b"]


class RolloutCollector:
    """Acts with the current weights of a policy, one rollout after the other, without losing running episodes.

    `state` is the state of the policy after the last step, `scores` are the mean return and length (and success) of the
    episodes that ended in the latest rollout in which any did, and the diagnostics of the latest rollout.
    """

    def __init__(self, environment: VectorEnvironment, policy: ActingPolicy, settings: RolloutSettings) -> None:
        assert isinstance(policy, nn.Module)
        self.environment = environment
        self.policy = policy
        self.settings = settings
        self._module: nn.Module = policy
        self.loop = ActingLoop(environment, policy, sample_actions)
        self.state: State = policy.init_state(environment.rows)
        self.progress = EpisodeProgress(*torch.zeros(2, environment.rows, dtype=torch.float64))
        self.scores: dict[str, float] = {}

    def begin(self, seeds: IntArray) -> None:
        """Begin the first episode of every row."""
        self.loop.reset(seeds)

    @torch.no_grad()
    def collect(self) -> RolloutBatch:
        """Act for the steps of one rollout. Raises UserError for what the environment cannot do."""
        training = self._module.training
        # acting without dropout: the log-probabilities of actions are those that learning compares with
        self._module.eval()
        try:
            device = next(self._module.parameters()).device
            # the state with which the rollout begins: learning repeats its steps from there
            first_state = self.state
            actor = self.policy.begin_acting(self.state)
            steps = list[ActedStep]()
            next_values = list[Tensor]()
            for _ in range(self.settings.steps):
                step = self.loop.step(actor, device)
                # the value after a step is that of the next observation, which is known one step later
                if steps:
                    next_values[-1] = torch.where(_truncated(steps[-1]), next_values[-1], step.values)
                # the value after a limit of time is that of the observation which the episode ended with
                if step.result.truncated.any():
                    next_values.append(actor.value(*step.final_inputs.to(device)).cpu())
                else:
                    # a placeholder until the next step has its value
                    next_values.append(step.values)
                steps.append(step)
            assert self.loop.inputs is not None
            last_values = actor.value(*self.loop.inputs.to(device)).cpu()
            next_values[-1] = torch.where(_truncated(steps[-1]), next_values[-1], last_values)
            self.state = actor.end()
        finally:
            self._module.train(training)
        self._count_episodes(steps)
        rollout = self._batch(steps, torch.stack(next_values, 1), first_state)
        self.scores = {**self.scores, **_diagnostics(rollout)}
        return rollout

    def _batch(self, steps: list[ActedStep], next_values: Float[Tensor, "b l"], state: State) -> RolloutBatch:
        # (b, l, ...): one row for each episode's row, steps along the second axis
        inputs = PolicyInputs(*(torch.stack(parts, 1) for parts in zip(*(step.inputs for step in steps), strict=True)))
        values = torch.stack([step.values for step in steps], 1)
        results = [step.result for step in steps]
        rewards = torch.from_numpy(np.stack([result.rewards for result in results], 1))
        terminated = torch.from_numpy(np.stack([result.terminated for result in results], 1))
        done = torch.from_numpy(np.stack([result.done for result in results], 1))
        advantages = gae(
            values, next_values, rewards, terminated, done, self.settings.discount, self.settings.gae_lambda
        )
        return RolloutBatch(
            inputs.observations,
            torch.stack([step.actions for step in steps], 1),
            advantages=advantages,
            returns=advantages + values,
            segments=inputs.segments,
            previous_actions=inputs.previous_actions,
            previous_rewards=inputs.previous_rewards,
            log_probs=torch.stack([step.log_probs for step in steps], 1),
            values=values,
            state=state,
            objective=self.settings.objective,
        )

    def _count_episodes(self, steps: list[ActedStep]) -> None:
        ended_returns = list[Tensor]()
        ended_lengths = list[Tensor]()
        returns, lengths = self.progress
        for step in steps:
            returns = returns + torch.from_numpy(step.result.rewards)
            lengths = lengths + 1
            done = torch.from_numpy(step.result.done)
            ended_returns.append(returns[done])
            ended_lengths.append(lengths[done])
            returns = returns.masked_fill(done, 0)
            lengths = lengths.masked_fill(done, 0)
        # episodes that are running go on in the next rollout
        self.progress = EpisodeProgress(returns, lengths)
        all_returns = torch.cat(ended_returns)
        if len(all_returns):
            self.scores = episode_scores(all_returns, torch.cat(ended_lengths), self.environment.success_return)


def episode_scores(
    returns: Float[Tensor, " n"], lengths: Float[Tensor, " n"], success_return: float | None
) -> dict[str, float]:
    """The mean return and length of episodes, and the share of successes where the environment has any."""
    scores = {"return": float(returns.mean()), "episode_length": float(lengths.mean())}
    if success_return is not None:
        scores["success"] = float((returns >= success_return).double().mean())
    return scores


def _diagnostics(rollout: RolloutBatch) -> dict[str, float]:
    """The diagnostics of a rollout; the entropy is estimated by the log-probabilities of the actions drawn."""
    assert rollout.log_probs is not None
    assert rollout.values is not None
    scores = {"entropy": -float(rollout.log_probs.mean())}
    # constant returns have no variance to explain
    if variance := float(rollout.returns.var(correction=0)):
        scores["explained_variance"] = 1 - float((rollout.returns - rollout.values).var(correction=0)) / variance
    return scores


def gae(
    values: Float[Tensor, "b l"],
    next_values: Float[Tensor, "b l"],
    rewards: Float[Tensor, "b l"],
    terminated: Bool[Tensor, "b l"],
    done: Bool[Tensor, "b l"],
    discount: float,
    gae_lambda: float,
) -> Float[Tensor, "b l"]:
    """The advantages of generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    `next_values` follow each step in its own episode; no advantage reaches over an episode that is done, and nothing
    follows one that is terminated. Computed by torchrl. Raises UserError where it is not installed.
    """
    try:
        from torchrl.objectives.value.functional import generalized_advantage_estimate
    except ImportError as error:
        raise UserError('advantages need one more library: pip install "manyformer[rl]"') from error
    # torchrl has time on the second to last axis, with one number for each step
    columns: list[Any] = [part[..., None] for part in (values, next_values, rewards, done, terminated)]
    advantages, _ = generalized_advantage_estimate(discount, gae_lambda, *columns)
    result: Tensor = advantages[..., 0]
    return result


def check_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """The scores that a file says a collector had. Raises ValueError for others."""
    if not set(scores) <= {*EPISODE_SCORES, *ROLLOUT_DIAGNOSTICS} or not all(map(math.isfinite, scores.values())):
        raise ValueError("these are no scores of rollouts")
    return dict(scores)


def _truncated(step: ActedStep) -> Bool[Tensor, " b"]:
    return torch.from_numpy(step.result.truncated)


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
        # safetensors takes no tensors that share memory, as states may
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
    # of the right shapes and types, with which those of the file are compared before they take their place
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
    # sizes may differ: a state grows with its episode
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
