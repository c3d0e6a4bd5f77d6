"""Policies: one query at a time by hand, acting as in learning, and episodes that see nothing of each other."""

import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.base.spaces import PixelSpace, VectorSpace, parse_observations
from manyformer.data.rollouts.rollout_collector import flatten_state, restore_state
from manyformer.models import PolicyModel
from manyformer.models.model import Model
from manyformer.nn.batches.episode_batches import ClippedObjective, RolloutBatch
from manyformer.nn.core import State, tree_map
from perturbing import perturb

ROWS, MEMORY, UNROLL, UNROLLS, ACTIONS, SIZE = 3, 4, 6, 3, 3, 5
STEPS = UNROLL * UNROLLS
SMALL = {"observations": SIZE, "actions": ACTIONS, "dim": 8, "depth": 2}
RECIPES: dict[str, dict[str, Any]] = {"gtrxl": {"heads": 2, "ff_dim": 12, "memory_length": MEMORY}, "lstm-policy": {}}


def make_policy(recipe: str = "gtrxl", **keywords: Any) -> PolicyModel:
    torch.manual_seed(3)
    model: Model = mf.build(recipe, **{**SMALL, **RECIPES[recipe], **keywords}).double()
    perturb(model, 0.3)
    assert isinstance(model, PolicyModel)
    return model.eval()


def draw_steps() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Observations, segments, previous actions and rewards; episodes end within, at and beyond the memory."""
    generator = torch.Generator().manual_seed(7)
    lengths = [[3, 4, 5, 6], [1, 9, 8], [18]]
    segments = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    observations = torch.randn(ROWS, STEPS, SIZE, generator=generator, dtype=torch.float64)
    actions = torch.randint(-1, ACTIONS, (ROWS, STEPS), generator=generator)
    rewards = torch.randn(ROWS, STEPS, generator=generator, dtype=torch.float64)
    return observations, torch.stack(segments), actions, rewards


def reference_gtrxl(model: PolicyModel, steps: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The gated Transformer-XL one row, one query and one head at a time, from the equations."""
    observations, segments, actions, rewards = steps
    weights = dict(model.named_parameters())
    w_a, w_r = weights["embed.action.weight"], weights["embed.reward.weight"]
    stream = observations @ weights["embed.observation.weight"].T + weights["embed.observation.bias"]
    stream = stream + w_a[actions + 1] + rewards[..., None] * w_r[:, 0]
    for number in range(SMALL["depth"]):
        layer = model.body.get_submodule(str(number))
        attention, ff = layer.get_submodule("attention"), layer.get_submodule("ff")
        inner = attention.inner
        normed = inner.pre_norm(stream)
        q, (k, v) = inner.q_proj(normed), inner.kv_proj(normed).chunk(2, -1)
        branch = torch.zeros_like(stream)
        for row in range(ROWS):
            for step in range(STEPS):
                first = max(0, step - MEMORY)
                keys = [j for j in range(first, step + 1) if segments[row, j] == segments[row, step]]
                branch[row, step] = attend(inner, q[row, step], k[row, keys], v[row, keys], [step - j for j in keys])
        join, ff_join = (operator.add if part.join is None else part.join for part in (attention, ff))
        stream = join(stream, torch.relu(inner.out_proj(branch)))
        hidden = torch.relu(ff.inner.up(ff.pre_norm(stream)))
        stream = ff_join(stream, torch.relu(ff.inner.down(hidden)))
    return model.policy_head(stream), model.value_head(stream)[..., 0]


def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, distances: list[int]) -> Tensor:
    """The heads of one query with Transformer-XL's scores."""
    heads = 2
    width, dim = len(q) // heads, SMALL["dim"]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.tensor(distances, dtype=torch.float64)[:, None] * frequencies
    # the table of sinusoids has single precision
    r = layer.position.r_proj(torch.cat([angles.sin(), angles.cos()], -1))
    outputs = []
    for head, (q_h, k_h, v_h, r_h) in enumerate(zip(*(x.split(width, -1) for x in (q, k, v, r)))):
        u, v_bias = layer.position.biases.u[head], layer.position.biases.v[head]
        scores = (k_h @ (q_h + u) + r_h @ (q_h + v_bias)) / math.sqrt(width)
        outputs.append(scores.softmax(0) @ v_h)
    return torch.cat(outputs)


def forward(model: PolicyModel, steps: tuple[Tensor, ...], state: State = None) -> Any:
    observations, segments, actions, rewards = steps
    return model(observations, segments, state, actions, rewards)


def columns(steps: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return tuple(part[:, start:stop] for part in steps)


@pytest.mark.parametrize("gate", ["gru", "residual", "highway"])
def test_gtrxl_is_its_equations(gate: str) -> None:
    model, steps = make_policy(gate=gate), draw_steps()
    output, (logits, values) = forward(model, steps), reference_gtrxl(model, steps)
    torch.testing.assert_close(output.logits, logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(output.values, values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_acting_is_learning(recipe: str) -> None:
    """Step by step, and unroll by unroll from the state that the actor had, as in one pass over everything."""
    model, steps = make_policy(recipe), draw_steps()
    expected, state = forward(model, steps), model.init_state(ROWS)
    for start in range(0, STEPS, UNROLL):
        unroll = columns(steps, start, start + UNROLL)
        learned = forward(model.train(), unroll, state)
        outputs, state = act(model.eval(), unroll, state)
        for actual in (learned, outputs):
            torch.testing.assert_close(actual.logits, expected.logits[:, start : start + UNROLL], rtol=0, atol=1e-9)
            torch.testing.assert_close(actual.values, expected.values[:, start : start + UNROLL], rtol=0, atol=1e-9)
        for acted, learned_tensor in zip(flatten_state(state), flatten_state(learned.state), strict=True):
            torch.testing.assert_close(acted, learned_tensor, rtol=0, atol=1e-9)


def act(model: PolicyModel, steps: tuple[Tensor, ...], state: State) -> tuple[Any, State]:
    """The outputs of an actor, with a glance at other observations before each step, which it must forget."""
    outputs = []
    with torch.no_grad():
        actor = model.begin_acting(state)
        for step in range(steps[0].shape[1]):
            observations, segments, actions, rewards = (part[:, step] for part in steps)
            actor.value(torch.randn_like(observations), segments, actions, rewards)
            assert torch.equal(*(actor.value(observations, segments, actions, rewards) for _ in range(2)))
            outputs.append(actor.act(observations, segments, actions, rewards))
        logits, values = (torch.stack(parts, 1) for parts in zip(*outputs))
    return type(forward(model, steps))(logits, values), actor.end()


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_seen_of_earlier_episodes(recipe: str) -> None:
    model, steps = make_policy(recipe), draw_steps()
    changed = tuple(part.clone() for part in steps)
    for row in range(ROWS):
        earlier = steps[1][row] < steps[1][row, -1]
        changed[0][row, earlier] += torch.randn(int(earlier.sum()), SIZE)
        changed[3][row, earlier] += 1
    last = steps[1] == steps[1][:, -1:]
    with torch.no_grad():
        before, after = (forward(model, draw).logits for draw in (steps, changed))
        acted_before, acted_after = (act(model, draw, model.init_state(ROWS))[0].logits for draw in (steps, changed))
    assert not torch.equal(before, after)
    assert torch.equal(before[last], after[last])
    assert torch.equal(acted_before[last], acted_after[last])


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_independent(recipe: str) -> None:
    model, steps, order = make_policy(recipe), draw_steps(), [2, 0, 1]
    first, second = columns(steps, 0, UNROLL), columns(steps, UNROLL, STEPS)
    _, state = act(model, first, model.init_state(ROWS))
    expected, _ = act(model, second, state)
    permuted_state = tree_map(lambda tensor: tensor[order], state)
    actual, _ = act(model, tuple(part[order] for part in second), permuted_state)
    torch.testing.assert_close(actual.logits, expected.logits[order], rtol=0, atol=1e-12)


def test_the_memory_gets_no_gradient() -> None:
    model, steps = make_policy().train(), draw_steps()
    _, state = act(model.eval(), columns(steps, 0, UNROLL), model.init_state(ROWS))
    leaves: list[Tensor] = []

    def require_grad(tensor: Tensor) -> Tensor:
        leaves.append(tensor.requires_grad_() if tensor.is_floating_point() else tensor)
        return leaves[-1]

    forward(model.train(), columns(steps, UNROLL, STEPS), tree_map(require_grad, state)).values.sum().backward()
    assert all(leaf.grad is None for leaf in leaves)
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "policy_head" not in name)


@pytest.mark.parametrize("gate", ["output", "highway", "sigtanh", "gru"])
def test_with_a_large_bias_the_network_is_its_embedding(gate: str) -> None:
    model = make_policy(gate=gate)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1e4) if name.endswith("join.bias") else None
        observations, segments, actions, rewards = draw_steps()
        expected = model.policy_head(model.embed(observations, actions, rewards))
        torch.testing.assert_close(model(observations, segments, None, actions, rewards).logits, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_is_stored_as_tensors(recipe: str) -> None:
    model, steps = make_policy(recipe), draw_steps()
    _, state = act(model, columns(steps, 0, UNROLL), model.init_state(ROWS))
    tensors = flatten_state(state)
    restored = restore_state(model.init_state(ROWS), tensors)
    rest = columns(steps, UNROLL, STEPS)
    assert torch.equal(act(model, rest, restored)[0].logits, act(model, rest, state)[0].logits)
    with pytest.raises(ValueError, match="not those of a state of this form"):
        restore_state(model.init_state(ROWS), tensors[:-1])


def test_states_are_equal_in_training_and_evaluation() -> None:
    model = make_policy()
    kinds = [[tensor.shape for tensor in flatten_state(m.init_state(2))] for m in (model.train(), model.eval())]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("keywords", [{"observations": "6x9x2"}, {"continuous": True}, {"previous_inputs": False}])
def test_other_spaces(recipe: str, keywords: dict[str, Any]) -> None:
    model, segments = make_policy(recipe, **keywords), torch.zeros(2, 4, dtype=torch.long)
    observations = torch.randint(256, (2, 4, *model.embed.space.shape), dtype=torch.uint8)
    rewards, actions = torch.zeros(2, 4).double(), torch.zeros(2, 4, dtype=torch.long)
    if model.continuous:
        actions = torch.zeros(2, 4, ACTIONS).double()
    output = model(observations, segments, None, actions, rewards)
    assert output.logits.shape == (2, 4, ACTIONS)
    distribution = model.distribution(output.logits)
    sample = distribution.sample()
    assert sample.shape == actions.shape
    assert distribution.log_prob(sample).shape == distribution.entropy().shape == (2, 4)
    if not keywords.get("previous_inputs", True):
        assert torch.equal(model(observations, segments).logits, output.logits)


def test_observations_are_a_number_or_three() -> None:
    assert parse_observations(3) == VectorSpace(3)
    assert parse_observations("8x16x3") == PixelSpace(8, 16, 3)
    assert [parse_observations(space.keyword) for space in (VectorSpace(2), PixelSpace(8, 6, 1))] == [
        VectorSpace(2),
        PixelSpace(8, 6, 1),
    ]
    for wrong in (0, "8x8", "0x8x3", "x", "", "-4", "8x8x3x3", "9999x9999x999"):
        with pytest.raises(UserError, match="observations"):
            parse_observations(wrong)


def test_wrong_inputs_get_a_sentence() -> None:
    model, (observations, segments, actions, rewards) = make_policy(), draw_steps()
    with pytest.raises(ValueError, match=r"observations \(3, 18, 4\) must be \(b, l, 5\)"):
        model(observations[..., 1:], segments, None, actions, rewards)
    with pytest.raises(ValueError, match="previous actions and rewards"):
        model(observations, segments)
    batch = RolloutBatch(observations, actions.clamp(min=0), rewards, rewards, segments, actions, rewards)
    with pytest.raises(UserError, match=r"loss.label_smoothing \(0.1\) must be 0"):
        model.loss(batch, label_smoothing=0.1)


def rollout_batch(objective: ClippedObjective) -> RolloutBatch:
    observations, segments, actions, rewards = draw_steps()
    advantages, returns, log_probs = torch.randn(3, ROWS, STEPS, dtype=torch.float64)
    chosen = actions.clamp(min=0)
    return RolloutBatch(
        observations,
        chosen,
        advantages,
        returns,
        segments,
        actions,
        rewards,
        log_probs=log_probs * 0.1 - math.log(ACTIONS),
        objective=objective,
    )


@pytest.mark.parametrize("normalize", [False, True])
def test_the_loss_is_the_clipped_objective(normalize: bool) -> None:
    """Summed over steps, one at a time; steps that are none do not count."""
    model = make_policy()
    batch = rollout_batch(ClippedObjective(clip=0.1, normalize_advantages=normalize))
    batch.segments[0, 13:] = -1
    with torch.no_grad():
        loss, output, total, count = model.loss(batch), model._outputs(batch), 0.0, 0
    valid = batch.segments >= 0
    mean, std = batch.advantages[valid].mean(), batch.advantages[valid].std(unbiased=False)
    for row, step in valid.nonzero().tolist():
        log_probs = output.logits[row, step].log_softmax(0)
        ratio = math.exp(float(log_probs[batch.actions[row, step]] - batch.log_probs[row, step]))  # type: ignore[index]
        advantage = float(batch.advantages[row, step] - mean) / float(std) if normalize else batch.advantages[row, step]
        entropy = -float((log_probs.exp() * log_probs).sum())
        error = float(output.values[row, step] - batch.returns[row, step])
        total += -min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage) + 0.5 * error**2 - 0.01 * entropy
        count += 1
    assert int(loss.targets) == count == batch.target_count() == batch.token_count()
    torch.testing.assert_close(float(loss.total), float(total), rtol=1e-9, atol=1e-9)
    assert float(model.loss(batch.ignored()).total.detach()) == 0.0


def test_nearly_equal_advantages_are_not_normalized() -> None:
    model, batch = make_policy(), rollout_batch(ClippedObjective())
    equal = batch._replace(advantages=torch.full_like(batch.advantages, 0.5))
    plain = equal._replace(objective=ClippedObjective(normalize_advantages=False))
    assert torch.equal(model.loss(equal).total, model.loss(plain).total)
