"""The Decision Transformer: its equations, what its actions depend on, its bodies, and acting step by step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models import DecisionTransformer, EpisodeDecoder
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.batches.episode_batches import TrajectoryBatch
from manyformer.nn.core import PADDING_SEGMENT

LENGTH, OBSERVED, ACTIONS, WINDOW = 9, 3, 5, 4
SIZES: dict[str, Any] = {
    "observations": OBSERVED,
    "actions": ACTIONS,
    "dim": 8,
    "depth": 2,
    "heads": 2,
    "window": WINDOW,
}


def model_with(**keywords: Any) -> DecisionTransformer:
    """A model in double precision, all of whose parameters are perturbed."""
    torch.manual_seed(0)
    model = mf.build("decision-transformer", **(SIZES | {"max_episode_length": 32} | keywords)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    assert isinstance(model, DecisionTransformer)
    return model


def steps(rows: int = 2, length: int = LENGTH, *, continuous: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    actions = torch.rand(rows, length, ACTIONS).double() if continuous else torch.randint(ACTIONS, (rows, length))
    return torch.randn(rows, length).double(), torch.randn(rows, length, OBSERVED).double(), actions


def naive(model: DecisionTransformer, returns: Tensor, observations: Tensor, actions: Tensor, first: int) -> Tensor:
    """Section 3 of the paper for one episode of discrete actions, token by token, with ReLU and two heads."""
    weights = model.state_dict()

    def linear(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape, weights[f"{name}.weight"], weights[f"{name}.bias"])

    stream = []
    for step in range(len(returns)):
        time = weights["embed.timestep.weight"][first + step]
        one_hot = F.one_hot(actions[step], ACTIONS).double()
        stream += [
            linear("embed.embed_return", returns[step : step + 1] / model.embed.return_scale) + time,
            linear("embed.embed_observation", observations[step]) + time,
            linear("embed.embed_action", one_hot) + time,
        ]
    stream = [norm("embed.norm", x) for x in stream]
    for layer in ("body.0", "body.1"):
        normed = [norm(f"{layer}.attention.pre_norm", x) for x in stream]
        q, kv = ([linear(f"{layer}.attention.inner.{name}", x) for x in normed] for name in ("q_proj", "kv_proj"))
        for i, x in enumerate(stream):
            heads = []
            for columns in (slice(0, 4), slice(4, 8)):
                scores = torch.stack([q[i][columns] @ kv[j][:8][columns] / 2 for j in range(i + 1)]).softmax(0)
                heads.append(sum(score * kv[j][8:][columns] for j, score in enumerate(scores)))
            x = x + linear(f"{layer}.attention.inner.out_proj", torch.cat(heads))  # type: ignore[arg-type]
            hidden = linear(f"{layer}.ff.inner.up", norm(f"{layer}.ff.pre_norm", x)).relu()
            stream[i] = x + linear(f"{layer}.ff.inner.down", hidden)
    return torch.stack([linear("head", norm("body.norm.inner", x)) for x in stream[1::3]])


@torch.no_grad()
def test_it_is_what_the_paper_says() -> None:
    model, (returns, observations, actions) = model_with(return_scale=3.0), steps(1)
    logits = model(returns, observations, actions, timesteps=torch.arange(7, 7 + LENGTH)[None]).logits[0]
    torch.testing.assert_close(logits, naive(model, returns[0], observations[0], actions[0], 7))


@pytest.mark.parametrize("continuous", [False, True])
@torch.no_grad()
def test_an_action_depends_on_its_own_return_and_observation_but_not_on_itself(continuous: bool) -> None:
    model, (returns, observations, actions) = model_with(continuous=continuous), steps(continuous=continuous)
    expected = model(returns, observations, actions).logits
    for changed, first in ((0, 2), (1, 2), (2, 3)):
        parts = [returns.clone(), observations.clone(), actions.clone()]
        parts[changed][:, 2] = parts[changed][:, 2] / 2 + 0.25 if changed < 2 or continuous else (actions[:, 2] + 1) % 5
        difference = (model(*parts).logits - expected).abs().amax((0, 2))
        assert not difference[:first].any()
        assert difference[first:].all()


@pytest.mark.parametrize("keywords", [{}, {"returns": False}, {"body": "linear-transformer"}, {"body": "alibi"}])
@torch.no_grad()
def test_padding_on_the_left_and_other_windows_of_a_row_change_nothing(keywords: dict[str, Any]) -> None:
    model, (returns, observations, actions) = model_with(**keywords), steps(1)
    times = torch.tensor([[0, 0, 5, 6, 7, 8, 0, 1, 2]])
    segments = torch.tensor([[PADDING_SEGMENT] * 2 + [0] * 4 + [1] * 3])
    packed = model(returns, observations, actions, segments, timesteps=times).logits
    for columns in (slice(2, 6), slice(6, 9)):
        alone = model(*(part[:, columns] for part in (returns, observations, actions)), timesteps=times[:, columns])
        torch.testing.assert_close(packed[:, columns], alone.logits)


BODIES = [
    None,
    "transformer-lm",
    "linear-transformer",
    "transformer-xl",
    "alibi",
    "compressive-transformer",
    "performer",
]


@pytest.mark.parametrize("keywords", [*({"body": name} for name in BODIES), {"returns": False}, {"continuous": True}])
@torch.no_grad()
def test_acting_equals_the_model_applied_to_the_last_steps(keywords: dict[str, Any]) -> None:
    model, length, continuous = model_with(**keywords), 5 * WINDOW, bool(keywords.get("continuous"))
    returns, observations, actions = steps(length=length, continuous=continuous)
    decoder = EpisodeDecoder(model, 2)
    for step in range(length):
        previous = actions[:, step - 1] if step else None
        logits = decoder.step(returns[:, step], observations[:, step], previous)
        window = slice(max(0, step - WINDOW + 1), step + 1)
        timesteps = torch.arange(length)[None, window].expand(2, -1)
        expected = model(returns[:, window], observations[:, window], actions[:, window], timesteps=timesteps).logits
        torch.testing.assert_close(logits, expected[:, -1])


@torch.no_grad()
def test_acting_within_the_window_computes_the_new_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (returns, observations, actions) = model_with(), steps()
    widths: list[int] = []
    run_tokens = model.run_tokens
    monkeypatch.setattr(model, "run_tokens", lambda x, *rest: (widths.append(x.shape[1]), run_tokens(x, *rest))[1])
    decoder = EpisodeDecoder(model, 2)
    for step in range(WINDOW + 2):
        decoder.step(returns[:, step], observations[:, step], actions[:, step - 1] if step else None)
    assert widths == [2, 3, 3, 3, 3 * WINDOW, 3 * WINDOW]


def batch_of(model: DecisionTransformer, *, continuous: bool) -> TrajectoryBatch:
    returns, observations, actions = steps(continuous=continuous)
    segments = torch.zeros(2, LENGTH, dtype=torch.long)
    segments[0, :3] = PADDING_SEGMENT
    targets = actions.clone()
    targets[0, :3] = float("nan") if continuous else IGNORE_INDEX
    times = torch.arange(LENGTH).expand(2, -1)
    return TrajectoryBatch(returns.float(), observations.float(), actions, targets, times, segments)


@pytest.mark.parametrize("continuous", [False, True])
def test_the_loss_counts_valid_steps_alone(continuous: bool) -> None:
    box = {"action_low": (-2.0,) * ACTIONS, "action_high": (4.0,) * ACTIONS} if continuous else {}
    model = model_with(continuous=continuous, **box)
    batch = batch_of(model, continuous=continuous)
    logits = model(batch.returns, batch.observations, batch.actions, batch.segments, timesteps=batch.timesteps).logits
    valid = batch.segments == 0
    if continuous:
        expected = ((logits - batch.targets)[valid] / 3).square().mean(-1).sum()
        assert -2 < float(logits.detach().min()) < float(logits.detach().max()) < 4
    else:
        expected = F.cross_entropy(logits[valid], batch.targets[valid], reduction="sum")
    loss, scored = model.loss(batch), model.score(batch)
    assert int(loss.targets) == int(scored.targets) == batch.target_count() == batch.token_count() == 2 * LENGTH - 3
    torch.testing.assert_close(loss.total, expected, check_dtype=False)
    torch.testing.assert_close(scored.nll, expected, check_dtype=False)
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    assert batch.ignored().target_count() == 0


def test_what_a_model_cannot_be_is_refused_in_a_sentence() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"body": "reformer"}, r"body \(reformer\) must be a recipe that promises to be causal"),
        ({"body": "bert"}, r"body \(bert\) must be a recipe that promises to be causal"),
        ({"body": "transformer"}, r"body \(transformer\) must be the recipe of a language model"),
        ({"body": "spalm"}, r"attends to tokens retrieved from a text"),
        ({"body": "deep-char-lm"}, r"losses of its intermediate layers"),
        ({"body": "alibi", "body_keywords": {"dim": 4}}, r"body_keywords.dim \(4\) must be given as dim"),
        ({"body_keywords": {"max_span": 4}}, r"body_keywords \(max_span\) are for the recipe `body`, which is null"),
        ({"return_scale": 0.0}, r"return_scale \(0.0\) must be above 0"),
        ({"action_low": (0.0,)}, "action_low and action_high are for continuous actions"),
        ({"continuous": True, "action_low": (0.0,)}, "must have a number for each of 5"),
        ({"continuous": True, "action_low": (1.0,) * 5}, "must be below action_high"),
        ({"observation_mean": (0.0,)}, "observation_mean has 1 numbers, and there are 3 observations"),
        ({"observation_std": (0.0,) * 3}, "standard deviations above 0"),
    ]
    for keywords, sentence in cases:
        with pytest.raises(UserError, match=sentence):
            mf.build("decision-transformer", **(SIZES | keywords))
    model = model_with(continuous=True)
    with pytest.raises(UserError, match="label_smoothing"):
        model.loss(batch_of(model, continuous=True), label_smoothing=0.1)


def test_a_body_keeps_its_keywords_and_only_its_promises() -> None:
    keywords = {"body": "transformer-lm", "body_keywords": {"gelu_approximate": "tanh"}}
    model = mf.build("decision-transformer", **(SIZES | keywords))
    assert [module.approximate for module in model.modules() if isinstance(module, torch.nn.GELU)] == ["tanh"] * 2
    model = mf.build("decision-transformer", **(SIZES | {"body": "compressive-transformer"}))
    assert mf.check(model, length=12, only=["cached"]).rows[0].verdict == "not promised"
