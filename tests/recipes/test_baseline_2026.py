"""baseline-2026 against a plain loop over tokens, with each of its parts on and off, and its parts in other recipes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face.model_export import export_model
from manyformer.models import LanguageModel
from manyformer.nn.core import Context, contiguous_positions
from manyformer.training.layers import checkpoint_activations

SIZES: dict[str, Any] = {"vocab": 11, "dim": 32, "depth": 5, "heads": 4, "kv_heads": 2, "window": 3, "windows": "SL"}
OFF: dict[str, Any] = {
    "embedding_norm": False,
    "qk_norm": False,
    "logit_cap": None,
    "embedding_skip": False,
    "value_embeddings": False,
    "smear": False,
    "backout": False,
}
ALL: dict[str, Any] = {"value_residual": True, "unet_skips": True, "canon": "ABCD"}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "all parts": ALL,
    "no part": OFF,
    "gates": {**ALL, "feedforward": "swiglu"},
    "tied": {"tied": True, "learned_norms": True},
    **{f"without {name}": {name: value} for name, value in OFF.items()},
    **{f"with {name}": {name: value} for name, value in ALL.items()},
    **{f"canon {letter}": {"canon": letter} for letter in "ABCD"},
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])


def build(recipe: str = "baseline-2026", **keywords: Any) -> Any:
    """A model in which no weight is what it begins with: zeros would hide parts."""
    torch.manual_seed(0)
    model = mf.build(recipe, **{**SIZES, **keywords}).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor) -> Tensor:
    """Rotary positions of (l, h, e): channel i and i + e / 2 are a pair."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 100_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """x plus the sum of the last tokens, each with its tap; the last tap is that of the token itself."""
    rows = [sum((taps[-1 - back] * x[t - back] for back in range(min(t + 1, len(taps)))), x[t]) for t in range(len(x))]
    return torch.stack(rows)


def reference(model: nn.Module, tokens: Tensor, **asked: Any) -> Tensor:
    """The logits of one text, one part after another."""
    given = {**dict.fromkeys(OFF, True), "logit_cap": 15.0, **dict.fromkeys(ALL, ""), **asked}
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    depth = SIZES["depth"]
    canon = given["canon"]

    def normed(x: Tensor, name: str) -> Tensor:
        return rms(x) * weights.get(f"{name}.weight", torch.ones(()))

    x = weights["embed.token.weight"][tokens]
    if given["embedding_norm"]:
        x = normed(x, "embed.norm")
    if given["smear"]:
        gate = weights["body.smear.scale"] * torch.sigmoid(x[1:, :24] @ weights["body.smear.gate.weight"].T)
        x = torch.cat([x[:1], x[1:] + gate * x[:-1]])
    x_0, outputs, first_values = x, [], None
    for n in range(depth):
        if given["unet_skips"] and n >= depth - depth // 2:
            x = x + weights["body.rule.lower"][n - (depth - depth // 2)] * outputs[depth - 1 - n]
        if given["embedding_skip"]:
            x = weights["body.rule.keep"][n] * x + weights["body.rule.embed"][n] * x_0
        y, own = normed(x, f"body.{n}.attention.pre_norm"), f"body.{n}.attention.inner."
        if "A" in canon:
            y = convolved(y, weights[f"{own}short_convolution.weight"])
            own += "inner."
        projections = torch.cat([y @ weights[f"{own}{name}.weight"].T for name in ("q_proj", "kv_proj")], -1)
        if "B" in canon:
            projections = convolved(projections, weights[f"{own}short_convolution.weight"])
        q, k, v = (part.unflatten(-1, (-1, 8)) for part in projections.split([32, 16, 16], -1))
        stages = 0
        if given["value_residual"]:
            first_values = v if first_values is None else first_values
            if n:
                share = weights[f"{own}value_stages.0.share"]
                v = share * v + (1 - share) * first_values
            stages = 1
        if given["value_embeddings"] and n % 2 == 0:
            stage = f"{own}value_stages.{stages}."
            gates = 3 * torch.sigmoid(y[:, :12] @ weights[f"{stage}gate.weight"].T)
            v = v + gates[..., None] * weights[f"{stage}table.weight"][tokens].view(-1, 2, 8)
        if given["qk_norm"]:
            q, k = 1.2 * rms(q), 1.2 * rms(k)
        q, k = turned(q), turned(k)
        heads = []
        for head in range(4):
            scores = q[:, head] @ k[:, head // 2].T / 8**0.5
            seen = (
                torch.ones_like(scores).tril() if n % 2 or n == depth - 1 else torch.ones_like(scores).tril().triu(-2)
            )
            heads.append(scores.masked_fill(seen == 0, -torch.inf).softmax(-1) @ v[:, head // 2])
        x = x + torch.cat(heads, -1) @ weights[f"{own}out_proj.weight"].T
        y, own = normed(x, f"body.{n}.ff.pre_norm"), f"body.{n}.ff.inner."
        if "C" in canon:
            y = convolved(y, weights[f"{own}short_convolution.weight"])
            own += "inner."
        taps = weights.get(f"{own}short_convolution.weight") if "D" in canon else None
        own += "inner." if "D" in canon else ""
        maps = ("gate", "up") if given.get("feedforward") == "swiglu" else ("up",)
        hidden = torch.cat([y @ weights[f"{own}{name}.weight"].T for name in maps], -1)
        hidden = hidden if taps is None else convolved(hidden, taps)
        gate, values = hidden.chunk(2, -1) if len(maps) == 2 else (hidden, hidden)
        x = x + (F.silu(gate) * values if len(maps) == 2 else values.relu() ** 2) @ weights[f"{own}down.weight"].T
        outputs.append(x)
    if given["backout"]:
        x = x - weights["body.rule.middle"] * outputs[depth // 2]
    logits = normed(x, "body.norm.inner") @ weights["head.weight"].T
    cap = given["logit_cap"]
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_a_plain_loop(case: str) -> None:
    model = build(**CASES[case])
    with torch.no_grad():
        logits = model(TOKENS).logits[0]
    torch.testing.assert_close(logits, reference(model, TOKENS[0], **CASES[case]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["default", "all parts", "gates"])
def test_one_token_at_a_time_in_pieces_and_in_packed_rows_it_is_the_same(case: str) -> None:
    model: LanguageModel = build(**CASES[case])
    with torch.no_grad():
        whole = model(TOKENS).logits
        step, state, logits = model.next_token(), model.init_state(1), []
        for token in TOKENS.split(1, dim=1):
            one, state = step(token, state, None)
            logits.append(one)
        first = model(TOKENS[:, :4], None, model.init_state(1))
        rest = model(TOKENS[:, 4:], None, first.state).logits
        # padding, the text, and another one behind it whose tokens begin alike
        packed = torch.cat([torch.zeros(1, 2, dtype=torch.long), TOKENS, TOKENS[:, :5]], 1)
        segments = torch.tensor([[-1] * 2 + [0] * 9 + [1] * 5])
        in_rows = model(packed, segments).logits
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(in_rows[:, 2:11], whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(in_rows[:, 11:], whole[:, :5], rtol=0, atol=1e-10)


def test_it_begins_as_the_normalized_embedding_and_every_weight_is_trained() -> None:
    """Outputs of branches are zero at first, so that what lies before them has a gradient from the second step on."""
    torch.manual_seed(0)
    model = mf.build("baseline-2026", **{**SIZES, **ALL})
    tokens = torch.randint(0, 11, (4, 16))
    x = rms(model.embed.token(tokens))
    torch.testing.assert_close(model(tokens).logits, 15 * torch.tanh(rms(x) @ model.head.weight.T / 15))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    untrained = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert untrained == []


def test_layers_that_are_computed_again_have_the_same_gradients() -> None:
    model = build(**ALL)
    gradients = []
    for again in (False, True):
        if again:
            checkpoint_activations(model)
        model.zero_grad()
        model(TOKENS).logits.square().sum().backward()
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)


def test_losses_of_layers_read_the_stream_that_the_rule_makes() -> None:
    """Of the last layer that is what the final norm gets; before the middle nothing is subtracted."""
    model = build(**ALL)
    positions = contiguous_positions(1, 0, 9, TOKENS.device).of_tokens(TOKENS)
    x = model.embed(TOKENS, positions)
    with torch.no_grad():
        outputs = [out.y for out in model.body.layer_outputs(x, Context(positions))]
        assert len(outputs) == SIZES["depth"] + 1
        torch.testing.assert_close(model.head(outputs[-1]), model(TOKENS).logits, rtol=0, atol=1e-12)
        torch.testing.assert_close(rms(outputs[-2]), outputs[-1], rtol=0, atol=1e-12)
        model.body.rule.middle.zero_()
        plain = [out.y for out in model.body.layer_outputs(x, Context(positions))]
        watched: list[Tensor] = []
        model(TOKENS, watch=lambda module, name, value: watched.append(value) if name == "stream" else None)
    torch.testing.assert_close(watched, plain[:-1], rtol=0, atol=1e-12)
    middle = SIZES["depth"] // 2
    assert all(torch.equal(one, other) for one, other in zip(outputs[:middle], plain[:middle]))
    assert not any(torch.equal(one, other) for one, other in zip(outputs[middle:], plain[middle:]))


@pytest.mark.parametrize("recipe", ["llama", "transformer-lm", "compose"])
def test_other_recipes_take_the_parts(recipe: str) -> None:
    """Switched on they change what is computed, one token at a time as for the whole text; off they change nothing."""
    parts: dict[str, Any] = {
        "embedding_skip": True,
        "value_embeddings": True,
        "value_residual": True,
        "smear": True,
        "backout": True,
        "unet_skips": True,
        "canon": "ABCD",
    }
    sizes = {"window": None, "windows": None}
    models = [mf.build(recipe, **{k: v for k, v in SIZES.items() if k not in sizes}, **more) for more in ({}, parts)]
    plain, changed = ({name: weight.shape for name, weight in model.named_parameters()} for model in models)
    assert not any("smear" in name or "value_stages" in name or "rule" in name for name in plain)
    assert {name.partition(".")[0] for name in changed} == {name.partition(".")[0] for name in plain}
    model = models[1].double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
        whole = model(TOKENS).logits
        step, state, logits = model.next_token(), model.init_state(1), []
        for token in TOKENS.split(1, dim=1):
            one, state = step(token, state, None)
            logits.append(one)
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("recipe", "keywords", "sentence"),
    [
        ("compose", {"norm_order": "post", "smear": True}, "branches are only added"),
        ("compose", {"residual_streams": "reversible", "backout": True}, "residual_streams=plain"),
        ("compose", {"kernel": "lsh", "value_embeddings": True}, "value_embeddings"),
        ("compose", {"pattern": "D", "canon": "B"}, "convolved already"),
        ("llama", {"loops": 2, "embedding_skip": True}, "loops"),
        ("llama", {"canon": "AE"}, "ABCD"),
        ("baseline-2026", {"windows": "SX"}, "windows"),
    ],
)
def test_parts_that_a_model_cannot_have_are_refused_in_a_sentence(
    recipe: str, keywords: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        mf.build(recipe, vocab=11, dim=16, depth=2, heads=2, **keywords)


@pytest.mark.parametrize(
    ("keywords", "sentence"), [({}, "a StreamStack is none"), ({"embedding_skip": False}, "look tokens up")]
)
def test_early_exits_of_layers_that_read_more_than_the_stream_are_refused(
    keywords: dict[str, Any], sentence: str
) -> None:
    rest = {"smear": False, "backout": False} if keywords else {}
    with pytest.raises(UserError, match=sentence):
        mf.early_exit(build(**keywords, **rest))


def test_no_class_of_transformers_stands_for_a_model_with_parts_that_it_lacks(tmp_path: Path) -> None:
    model = mf.build("llama", vocab=11, dim=16, depth=2, heads=2, backout=True)
    reason = export_model(model, tmp_path / "one").reason
    assert reason is not None
    assert "backout is True" in reason
    assert (
        export_model(mf.build("llama", vocab=11, dim=16, depth=2, heads=2, zero_outputs=True), tmp_path / "two").reason
        is None
    )


def test_heads_can_be_removed_with_their_vectors_of_tokens() -> None:
    model = build(kv_heads=4)
    attention = model.body.get_submodule("4.attention.inner")
    columns = attention.out_proj.weight.detach().clone()
    attention.out_proj.weight.data[:, 8:16] = 0
    with torch.no_grad():
        without = model(TOKENS).logits
        attention.out_proj.weight.data.copy_(columns)
        attention.keep_heads([0, 2, 3])
        torch.testing.assert_close(model(TOKENS).logits, without, rtol=0, atol=1e-10)
    assert attention.value_stages[0].table.weight.shape == (11, 24)


def test_vectors_in_place_of_tokens_are_refused_where_layers_look_tokens_up() -> None:
    with pytest.raises(UserError, match="look tokens up"):
        build()(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.double))
    assert build(value_embeddings=False)(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.double)).logits.shape[1] == 3
