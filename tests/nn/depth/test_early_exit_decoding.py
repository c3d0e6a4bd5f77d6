"""Incremental decoding with early exit_layers: equal to one pass by the same rule, without the skipped computation."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.inference.generate import BeamSettings, Decoding, generate
from manyformer.inference.generate.next_token import bind_next_token
from manyformer.models.with_early_exit import early_exit
from manyformer.nn.core import PADDING_SEGMENT, tree_map
from manyformer.nn.runtime.costs import count_flops
from perturbing import perturb

SIZES: dict[str, Any] = {"vocab": 29, "dim": 16, "depth": 5, "heads": 4, "ff_dim": 24}
RULES: list[dict[str, Any]] = [
    {"rule": "softmax", "threshold": 0.4},
    {"rule": "softmax", "threshold": 0.8, "threshold_decay": 4.0, "horizon": 9, "classifier_sharing": "per-layer"},
    {"rule": "likeliest", "threshold": (0.6, 2.0, 0.6, 0.6)},
    {"rule": "saturation", "threshold": 0.6},
    {"rule": "geometric", "threshold": 0.8, "classifier_sharing": "per-layer"},
    {"rule": "multinomial"},
    {"rule": "sequence"},
    {"rule": "never"},
]
LENGTH = 11


def build_translator(keywords: dict[str, Any], norm: str = "pre") -> Any:
    return perturb(early_exit(mf.build("transformer", **SIZES, norm_order=norm), **keywords), 0.3).double().eval()


@torch.inference_mode()
def decode_steps(model: Any, tokens: Tensor, start: Any, memory: Any = None) -> Tensor:
    next_token, state = bind_next_token(model), start
    actual = []
    for token in tokens.split(1, dim=1):
        logits, state = next_token(token, state, memory)
        actual.append(logits)
    return torch.cat(actual, 1)


def exit_layers(model: Any, *inputs: Any) -> Tensor:
    actual: list[Tensor] = []
    model(*inputs, watch=lambda part, name, value: actual.append(value) if name == "depth" else None)
    return actual[0]


@pytest.mark.parametrize(("norm", "capacity"), [("pre", LENGTH), ("post", None)])
@pytest.mark.parametrize("keywords", RULES, ids=[f"{n}-{keywords['rule']}" for n, keywords in enumerate(RULES)])
def test_steps_are_one_pass(keywords: dict[str, Any], norm: str, capacity: int | None) -> None:
    model = build_translator(keywords, norm)
    source, target = torch.randint(0, 29, (6, 7)), torch.randint(0, 29, (6, LENGTH))
    for segments in (None, torch.tensor([[0] * 7, [0] * 4 + [PADDING_SEGMENT] * 3] * 3)):
        memory = model.encode(source, segments)
        with torch.inference_mode():
            start = model.init_state(6, capacity=capacity)
        expected = model.decode(target, memory).logits
        torch.testing.assert_close(decode_steps(model, target, start, memory), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("transformer-lm", {}),
        ("compose", {"kv_heads": 2, "position": "rope", "feedforward": "swiglu"}),
        # whose layers have no step
        ("compose", {"position": "alibi"}),
        ("longformer-lm", {"window": 3, "top_window": 5, "dilated_heads": 1}),
        ("linear-transformer", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("threshold", [0.4, 0.0])
def test_language_models_continue_a_prompt(name: str, keywords: dict[str, Any], threshold: float) -> None:
    model = perturb(early_exit(mf.build(name, **SIZES, **keywords), threshold=threshold), 0.3).double().eval()
    tokens = torch.randint(0, 29, (4, LENGTH))
    with torch.inference_mode():
        state = model(tokens[:, :4], state=model.init_state(4, capacity=LENGTH)).state
    actual = decode_steps(model, tokens[:, 4:], state)
    torch.testing.assert_close(actual, model(tokens).logits[:, 4:], rtol=1e-9, atol=1e-9)


def test_rows_exit_at_different_layers() -> None:
    """The other tests depend on it."""
    source, target = torch.randint(0, 29, (6, 7)), torch.randint(0, 29, (6, LENGTH))
    for keywords in (RULES[0], RULES[2], RULES[4], RULES[5]):
        depth = exit_layers(build_translator(keywords), source, target)
        assert (depth.amax(0) != depth.amin(0)).sum() >= 3


def test_rows_can_be_reordered_and_several_tokens_decoded() -> None:
    """Pending streams are reordered with their rows, and processed by the next call of any length."""
    model = build_translator(RULES[0])
    source, target, order = torch.randint(0, 29, (4, 7)), torch.randint(0, 29, (4, LENGTH)), torch.tensor([2, 0, 0])
    with torch.inference_mode():
        next_token, memory, state = bind_next_token(model), model.encode(source), model.init_state(4, capacity=LENGTH)
        for token in target[:, :5].split(1, dim=1):
            _, state = next_token(token, state, memory)
        assert min(state.body.filled) < state.body.columns
        state, memory = tree_map(lambda t: t.index_select(0, order), (state, memory))
        mixed = torch.cat([target[order, :5], target[:3, 5:]], 1)
        # two tokens in one call use `forward`
        out = model.decode(mixed[:, 5:7], memory, None, state)
        logits, _ = next_token(mixed[:, 7:8], out.state, memory)
        expected = model.decode(mixed[:, :8], memory).logits
    torch.testing.assert_close(out.logits, expected[:, 5:7])
    torch.testing.assert_close(logits, expected[:, 7:])


def test_a_full_cache_is_an_error() -> None:
    model = build_translator(RULES[0])
    with torch.inference_mode(), pytest.raises(ValueError, match="capacity=2, but 3 tokens"):
        decode_steps(
            model,
            torch.zeros(1, 3, dtype=torch.long),
            model.init_state(1, capacity=2),
            model.encode(torch.ones(1, 2).long()),
        )


@pytest.mark.parametrize("width", [None, 3])
def test_generated_texts_are_those_without_a_cache(width: int | None) -> None:
    model = build_translator(RULES[0])
    rows = [torch.randint(3, 29, (n,)).tolist() for n in (4, 7, 2)]
    actual = []
    for cached in (True, False):
        decoding = Decoding(max_new=9, use_cache=cached) if width is None else Decoding(
            choice=BeamSettings(width), max_new=9, use_cache=cached
        )  # fmt: skip
        actual.append(generate(model, rows, decoding=decoding).tokens)
    assert actual[0] == actual[1]


def test_skipped_layers_cost_nothing() -> None:
    """If all tokens exit after layer n, a step costs n layers."""

    def cost(threshold: Any, rows: int = 8) -> int:
        model = early_exit(mf.build("transformer", **SIZES), rule="geometric", threshold=threshold).eval()
        with torch.inference_mode():
            next_token, state = bind_next_token(model), model.init_state(rows, capacity=4)
            memory, token = model.encode(torch.ones(rows, 3).long()), torch.ones(rows, 1).long()
            _, state = next_token(token, state, memory)
            return count_flops(lambda: next_token(token, state, memory))

    one, two, three = cost((0.0,) * 4), cost((2.0, 0.0, 0.0, 0.0)), cost((2.0, 2.0, 0.0, 0.0))
    assert three - two == two - one
    assert cost(2.0) - three == pytest.approx(2 * (two - one), rel=0.02)


def test_pending_streams_are_processed_together() -> None:
    model = build_translator({"rule": "geometric", "threshold": 0.0})
    with torch.inference_mode():
        next_token, memory, state = (
            bind_next_token(model),
            model.encode(torch.ones(2, 3).long()),
            model.init_state(2, capacity=6),
        )
        for _ in range(4):
            _, state = next_token(torch.ones(2, 1).long(), state, memory)
        assert state.body.filled == (4, 0, 0, 0, 0)
        model.decoder.rule.values = (2.0, 2.0, 0.0, 0.0)
        _, state = next_token(torch.ones(2, 1).long(), state, memory)
        assert state.body.filled == (5, 5, 5, 0, 0)
