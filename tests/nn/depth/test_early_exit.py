"""Tokens that leave early: the limits, what is copied upwards, what is learned, and what every recipe gives wrapped."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.own_models import TINY_KEYWORDS
from manyformer.base.errors import UserError
from manyformer.models.exit_classifiers import ExitClassifiers
from manyformer.models.exit_loss import best_layers
from manyformer.models.head import MIN_CHUNKED_CLASSES, ClassHead
from manyformer.models.with_early_exit import early_exit
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch, Seq2SeqBatch
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions
from manyformer.nn.depth.early_exit_stack import EarlyExit
from manyformer.nn.depth.exit_rules import ExitRuleInput, GeometricExitRule, MarginExitRule
from manyformer.nn.streams import StreamStack
from manyformer.recipes import RECIPES
from manyformer.recipes.parts.registry import card_of
from perturbing import perturb

SIZES: dict[str, Any] = {"vocab": 13, "dim": 8, "depth": 4, "heads": 2, "ff_dim": 12, "dropout": 0.0}
ALL_RULES = ["softmax", "saturation", "likeliest", "classifier", "geometric"]


def shaken(model: Any, by: float = 0.2) -> Any:
    return perturb(model, by).eval()


def depths(model: Any, *inputs: Any) -> Tensor:
    actual: list[Tensor] = []
    model(*inputs, watch=lambda part, name, value: actual.append(value) if name == "depth" else None)
    assert len(actual) == 1
    return actual[0]


def text_model(norm: str = "pre") -> Any:
    return shaken(mf.build("transformer-lm", **SIZES, norm_order=norm))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_limits_of_the_threshold(rule: Any, norm: str) -> None:
    model, tokens = text_model(norm).double(), torch.randint(0, 13, (2, 7))
    late: Any = early_exit(model, rule=rule, threshold=1.5).double()
    torch.testing.assert_close(late(tokens).logits, model(tokens).logits, atol=1e-12, rtol=0)
    first: Any = early_exit(model, rule=rule, threshold=0.0).double().eval()
    least = 2 if rule == "saturation" else 1
    assert (depths(first, tokens) == least).all()
    place = TokenPositions(torch.arange(7).expand(2, -1), torch.zeros(2, 7, dtype=torch.long))
    x = model.embed(tokens, place)
    for layer in first.body.layers[:least]:
        x = layer(x, Context(place)).y
    expected = model.head(x if norm == "post" else model.body.norm.inner(x))
    torch.testing.assert_close(first(tokens).logits, expected)


def one_by_one(model: Any, tokens: Tensor, exits: list[int]) -> Tensor:
    """The definition, token by token and layer by layer, in numbers of its own: pre-norm attention and feed-forward."""
    x = model.embed.token.weight[tokens] * model.embed.scale + model.embed.position.weight[: len(tokens)]
    streams = [[row] for row in x]
    for number, layer in enumerate(model.body.layers):
        attention, ff = layer.attention.inner, layer.ff.inner
        for t, exit_at in enumerate(exits):
            if number >= exit_at:
                # copied: the layer sees it, but it stays what it was
                streams[t].append(streams[t][-1])
                continue
            seen = layer.attention.pre_norm(torch.stack([streams[s][number] for s in range(t + 1)]))
            q = attention.q_proj(seen[-1]).view(2, 1, 4)
            k, v = (part.view(-1, 2, 4).transpose(0, 1) for part in attention.kv_proj(seen).chunk(2, -1))
            weights = (q @ k.mT / 2).softmax(-1)
            h = streams[t][-1] + attention.out_proj((weights @ v).flatten())
            streams[t].append(h + ff.down(ff.activation(ff.up(layer.ff.pre_norm(h)))))
    ready = model.body.norm.inner(torch.stack([stream[-1] for stream in streams]))
    return model.head.shared(ready)


def test_copied_states_are_projected_by_each_layer() -> None:
    model: Any = early_exit(text_model(), rule="softmax", threshold=0.05).eval()
    tokens = torch.randint(0, 13, (1, 9))
    actual = depths(model, tokens)[0].tolist()
    assert len(set(actual)) > 2
    torch.testing.assert_close(model(tokens).logits[0], one_by_one(model, tokens[0], actual))


@pytest.mark.parametrize("rule", ["softmax", "geometric", "multinomial", "sequence"])
def test_own_classifiers_say_what_their_layer_would(rule: Any) -> None:
    words: dict[str, Any] = {"threshold": 0.2} if rule == "softmax" else {}
    wrapped: Any = shaken(
        early_exit(
            mf.build("transformer", **SIZES, norm_order="pre"), rule=rule, classifier_sharing="per-layer", **words
        ),
        0.5,
    )
    for name, weight in wrapped.decoder.rule.named_parameters():
        nn.init.normal_(weight) if name.endswith("weight") else nn.init.zeros_(weight)
    source, target = torch.randint(0, 13, (3, 5)), torch.randint(0, 13, (3, 6))
    depth, logits = depths(wrapped, source, target), wrapped(source, target).logits
    assert len(depth.unique()) > 1 or rule == "sequence"
    place = TokenPositions(torch.arange(6).expand(3, -1), torch.zeros(3, 6, dtype=torch.long))
    memory = wrapped.encode(source)
    y = wrapped.decoder(wrapped.embed_target(target, place), Context(place, memory)).y
    heads = [*wrapped.head.per_layer, wrapped.head.shared]
    for row in range(3):
        for t in range(6):
            expected = heads[int(depth[row, t]) - 1](y[row, t, :-1])
            torch.testing.assert_close(logits[row, t], expected)


@pytest.mark.parametrize("vocab", [13, MIN_CHUNKED_CLASSES])
def test_classifiers_without_tokens_have_a_gradient_of_zero(vocab: int) -> None:
    exits = ExitClassifiers(ClassHead(4, vocab), [ClassHead(4, vocab)])
    y = torch.cat([torch.randn(3, 4), torch.full((3, 1), 2.0)], 1)
    exits.loss(y, torch.tensor([1, 2, IGNORE_INDEX]), label_smoothing=0.1).total.backward()  # type: ignore[no-untyped-call]
    (other,) = exits.per_layer.parameters()
    assert other.grad is not None
    assert not other.grad.any()


def test_decaying_threshold_in_numbers() -> None:
    unused = ExitClassifiers(ClassHead(2, 3))
    rule = MarginExitRule(unused, (0.8,), decay=4.0, horizon=10)
    pos = torch.tensor([[0, 5, 10]])
    expected = [0.9 * 0.8 + 0.1 * math.exp(-4 * t / 10) for t in (0, 5, 10)]
    torch.testing.assert_close(rule.decayed_threshold(0.8, pos)[0], torch.tensor(expected))
    seen = ExitRuleInput(1, *(torch.zeros(1, 3, 2),) * 3, pos)
    assert not MarginExitRule(unused, (1.01,), decay=4.0, horizon=10)(seen, None).exits.any()


def test_geometric_shares_are_those_of_the_paper() -> None:
    rule, streams = GeometricExitRule(4, (0.5,) * 3), [torch.randn(2, 5, 4) for _ in range(4)]
    leaves = [torch.sigmoid(rule.leave(stream))[..., 0] for stream in streams[:-1]]
    shares = rule.log_exit_probabilities(streams).exp()
    torch.testing.assert_close(shares[..., 0], leaves[0])
    torch.testing.assert_close(shares[..., 2], leaves[2] * (1 - leaves[0]) * (1 - leaves[1]))
    torch.testing.assert_close(shares[..., 3], (1 - leaves[0]) * (1 - leaves[1]) * (1 - leaves[2]))
    torch.testing.assert_close(shares.sum(-1), torch.ones(2, 5))


def choices(scores: Tensor, *, smoothing: float, penalty: float, counted: list[bool] | None = None) -> list[int]:
    length = scores.shape[1]
    pos, seg = torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long)
    there = torch.ones(1, length, dtype=torch.bool) if counted is None else torch.tensor([counted])
    return best_layers(scores[:, None], TokenPositions(pos, seg), there, smoothing=smoothing, layer_penalty=penalty)[
        0
    ].tolist()


def test_oracles_choose() -> None:
    scores = torch.tensor([[-3.0, -1.0, -1.0], [-1.0, -1.0, -0.4], [-0.5, -1.0, -0.5]])
    assert choices(scores, smoothing=0.0, penalty=0.0) == [3, 1, 2]
    assert choices(scores, smoothing=0.0, penalty=0.6) == [2, 1, 1]
    assert choices(scores, smoothing=0.0, penalty=100.0) == [1, 1, 1]
    # the sums of all three are -5, -2.4 and -2
    assert choices(scores, smoothing=math.inf, penalty=0.0) == [3, 3, 3]
    assert choices(scores, smoothing=math.inf, penalty=0.5) == [2, 2, 2]
    assert choices(scores, smoothing=math.inf, penalty=0.0, counted=[False, True, True]) == [2, 2, 2]


def test_smoothing_in_numbers() -> None:
    """The kernel is exp(-|t - t'|^2 / sigma): nearer tokens count for more, and another document for nothing."""
    scores, place = (
        torch.randn(3, 1, 5),
        TokenPositions(torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([[0, 0, 0, 1, 1]])),
    )
    actual = best_layers(scores, place, torch.ones(1, 5, dtype=torch.bool), smoothing=2.0, layer_penalty=0.1)
    for t, (begin, end) in enumerate([(0, 3)] * 3 + [(3, 5)] * 2):
        sums = [sum(scores[n, 0, s] * math.exp(-((t - s) ** 2) / 2) for s in range(begin, end)) for n in range(3)]
        assert actual[0, t] == max(range(3), key=lambda n: float(sums[n]) - 0.1 * n) + 1


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)


@pytest.mark.parametrize("weights", ["even", "rising"])
def test_aligned_training_is_the_mean_over_layers(weights: Any) -> None:
    model: Any = early_exit(text_model(), layer_weights=weights, classifier_sharing="per-layer").train()
    shaken(model).train()
    tokens = torch.randint(0, 13, (2, 6))
    targets = torch.where(torch.rand(2, 6) < 0.2, IGNORE_INDEX, tokens.roll(-1, 1))
    loss = model.loss(CausalLMBatch(tokens, targets))
    seen: list[Tensor] = []
    for layer in model.body.layers:
        layer.register_forward_hook(lambda _, __, out: seen.append(model.body.norm.inner(out.y)))
    model(tokens)
    heads = [*model.head.per_layer, model.head.shared]
    sizes = torch.tensor([1.0, 1, 1, 1] if weights == "even" else [1.0, 2, 3, 4])
    costs = torch.stack([mean(head(x), targets) for head, x in zip(heads, seen)])
    own = loss.total / loss.targets
    torch.testing.assert_close(own, costs[-1])
    torch.testing.assert_close(own + loss.extra, (sizes / sizes.sum() * costs).sum())


def test_mixed_training_leaves_at_random_and_copies() -> None:
    model: Any = shaken(early_exit(text_model(), rule="never", exit_training="mixed", mixed_samples=3)).train()
    tokens = torch.randint(0, 13, (1, 8))
    torch.manual_seed(1)
    loss = model.loss(CausalLMBatch(tokens, tokens.roll(-1, 1)))
    torch.manual_seed(1)
    drawn: list[Tensor] = []
    costs = []
    for _ in range(3):
        logits = model(tokens, watch=lambda part, name, value: drawn.append(value) if name == "depth" else None).logits
        torch.testing.assert_close(logits[0], one_by_one(model, tokens[0], drawn[-1][0].tolist()))
        costs.append(mean(logits, tokens.roll(-1, 1)))
    assert len(torch.stack(drawn).unique()) == 4
    torch.testing.assert_close(loss.total / loss.targets + loss.extra, torch.stack(costs).mean())


@pytest.mark.parametrize("oracle", ["likelihood", "correctness"])
@pytest.mark.parametrize("rule", ["geometric", "multinomial", "sequence"])
def test_what_a_predictor_learns(rule: Any, oracle: Any) -> None:
    """Targets, penalties and padding by hand; the gradient goes on into the model."""
    words: dict[str, Any] = {"smoothing": 0.0, "layer_penalty": 0.05, "exit_weight": 0.7}
    model: Any = shaken(early_exit(mf.build("transformer", **SIZES), rule=rule, oracle=oracle, **words)).train()
    source, target = torch.randint(0, 13, (2, 5)), torch.randint(0, 13, (2, 6))
    targets = target.roll(-1, 1)
    targets[1, 4:] = IGNORE_INDEX
    ends = torch.tensor([[0] * 6, [0] * 4 + [PADDING_SEGMENT] * 2])
    batch = Seq2SeqBatch(source, target, targets, None, ends)
    with_exits = model.loss(batch)
    exam, model.auxiliary.rule_loss = model.auxiliary.rule_loss, None
    extra = with_exits.extra - model.loss(batch).extra
    model.auxiliary.rule_loss = exam
    memory, place = model.encode(source), TokenPositions(torch.arange(6).expand(2, -1), ends)
    outs = model.decoder.layer_outputs(model.embed_target(target, place), Context(place, memory))
    logits = torch.stack([model.head(out.y) for out in outs])
    right = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).expand(4, 2, 6)[..., None])[..., 0]
    scores = right if oracle == "likelihood" else (logits.argmax(-1) == targets).float()
    costs: list[Tensor] = []
    for row, length in ((0, 6), (1, 4)):
        of_row = scores[:, row, :length] if rule != "sequence" else scores[:, row, :length].sum(-1, keepdim=True)
        expected = (of_row - 0.05 * torch.arange(1, 5)[:, None]).argmax(0)
        if rule == "sequence":
            costs.append(F.cross_entropy(model.decoder.rule.choose(memory.y[row].mean(0))[None], expected))
        elif rule == "multinomial":
            first = outs[0].y[row, :length, :-1]
            costs += F.cross_entropy(model.decoder.rule.choose(first), expected, reduction="none").unbind()
        else:
            shares = model.decoder.rule.log_exit_probabilities([out.y[row : row + 1, :length, :-1] for out in outs])[0]
            costs += (-shares.gather(-1, expected[:, None])[:, 0]).unbind()
    torch.testing.assert_close(extra, 0.7 * torch.stack(costs).mean(), rtol=1e-4, atol=1e-5)
    extra.backward()
    assert model.encoder.get_submodule("0").ff.inner.up.weight.grad.any()


def test_the_second_stage_learns_nothing_but_agreement() -> None:
    plain = text_model()
    model: Any = early_exit(plain, rule="classifier").train()
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert learning == ["body.rule.leave.weight", "body.rule.leave.bias"]
    tokens = torch.randint(0, 13, (2, 6))
    loss = model.loss(CausalLMBatch(tokens, tokens.roll(-1, 1)))
    outs = model.body.layer_outputs(*_into(model, tokens))
    said = torch.stack([model.head(out.y).argmax(-1) for out in outs])
    logits = torch.stack([model.body.rule.leave(out.y[..., :-1])[..., 0] for out in outs[:-1]])
    torch.testing.assert_close(loss.extra, F.binary_cross_entropy_with_logits(logits, (said[:-1] == said[-1]).float()))


def _into(model: Any, tokens: Tensor) -> Any:
    place = TokenPositions(torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1), torch.zeros_like(tokens))
    return model.embed(tokens, place), Context(place)


WRITERS = sorted(
    name
    for name, recipe in RECIPES.items()
    if recipe.card.task.name in ("language-model", "translation") and not name.startswith("early-exit")
)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", WRITERS)
def test_any_recipe_that_writes_can_be_wrapped(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    sizes = {key: value for key, value in TINY_KEYWORDS.items() if key in recipe.signature.parameters}
    model: Any = shaken(mf.build(name, **(sizes | recipe.card.tiny_keywords)))
    body = model.body if hasattr(model, "body") else model.decoder
    # those of spalm are followed by a layer that looks elsewhere, those of a rule read more than the stream below
    shows = any(child.isdigit() for child, _ in body.named_children()) and not isinstance(body, EarlyExit | StreamStack)
    shows = shows and name != "spalm"
    if not shows:
        with pytest.raises((UserError, ValueError), match="early"):
            early_exit(model)
        return
    # in float32 rounding could differ with the number of tokens that are computed together
    wrapped: Any = early_exit(model.double(), threshold=2.0)
    length = 32 if name.startswith(("gmlp", "synth", "linformer")) else 9
    tokens = torch.randint(5, 29, (2, length))
    inputs = (tokens,) if hasattr(model, "body") else (tokens, tokens)
    torch.manual_seed(0)
    full = model(*inputs).logits
    torch.manual_seed(0)
    torch.testing.assert_close(wrapped(*inputs).logits, full, rtol=0, atol=1e-10)
    card = card_of(wrapped.spec)
    assert card is not None
    assert ("incremental_decoding" in card.promises) == ("incremental_decoding" in recipe.card.promises)
    wrapped.save(tmp_path / "model")
    again: Any = mf.load(tmp_path / "model", keywords={"threshold": 0.01})
    assert again.spec.keywords["base_recipe"] == name
    assert depths(again, *inputs).unique().numel() >= 1


def test_what_contradicts_itself_is_refused() -> None:
    model = text_model()
    for words, complaint in (
        ({"rule": "multinomial", "threshold": 0.5}, "has no threshold"),
        ({"rule": "never", "threshold_decay": 4.0}, "has no threshold, so threshold_decay"),
        ({"threshold": (0.5, 0.5)}, "2 thresholds: there must be one for all layers, or one for each but the last, 3"),
        ({"threshold": -0.1}, "must be at least 0"),
        ({"rule": "geometric", "exit_training": "mixed"}, "mixed training is for the classifiers only"),
        ({"rule": "sequence"}, "a language model does not have"),
        ({"rule": "geometric", "layer_penalty": -1.0}, "layer_penalty"),
    ):
        with pytest.raises(UserError, match=complaint):
            early_exit(model, **words)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="already"):
        early_exit(early_exit(model))
    with pytest.raises(UserError, match="generates no tokens"):
        early_exit(mf.build("bert", **{**SIZES, "depth": 1}))
    with pytest.raises(ValueError, match="this stack is one Reversible"):
        early_exit(mf.build("transformer-lm", **SIZES, residual_streams="reversible"))
