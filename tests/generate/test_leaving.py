"""Decoding token by token with early exits: the same as one pass by the same rule, and what it no longer computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.core import PADDING_SEGMENT, tree_map
from manyformer.flops import count_flops
from manyformer.generate import BeamSettings, Decoding, generate
from manyformer.generate.bound import bind
from manyformer.models.with_early_exit import early_exit

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


def shaken(model: Any, by: float = 0.3) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=by)
    return model.double().eval()


def translating(words: dict[str, Any], norm: str = "pre") -> Any:
    return shaken(early_exit(mf.build("transformer", **SIZES, norm_order=norm), **words))


@torch.inference_mode()
def steps(model: Any, tokens: Tensor, start: Any, memory: Any = None) -> Tensor:
    following, state = bind(model), start
    found = []
    for token in tokens.split(1, dim=1):
        logits, state = following(token, state, memory)
        found.append(logits)
    return torch.cat(found, 1)


def exits(model: Any, *inputs: Any) -> Tensor:
    found: list[Tensor] = []
    model(*inputs, watch=lambda part, name, value: found.append(value) if name == "depth" else None)
    return found[0]


@pytest.mark.parametrize(("norm", "capacity"), [("pre", LENGTH), ("post", None)])
@pytest.mark.parametrize("words", RULES, ids=[f"{n}-{words['rule']}" for n, words in enumerate(RULES)])
def test_steps_are_one_pass(words: dict[str, Any], norm: str, capacity: int | None) -> None:
    model = translating(words, norm)
    source, target = torch.randint(0, 29, (6, 7)), torch.randint(0, 29, (6, LENGTH))
    for segments in (None, torch.tensor([[0] * 7, [0] * 4 + [PADDING_SEGMENT] * 3] * 3)):
        memory = model.encode(source, segments)
        with torch.inference_mode():
            start = model.init_state(6, capacity=capacity)
        expected = model.decode(target, memory).logits
        torch.testing.assert_close(steps(model, target, start, memory), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("transformer-lm", {}),
        ("compose", {"kv_heads": 2, "position": "rope", "feedforward": "swiglu"}),
        # whose layers the quick way does not know
        ("compose", {"position": "alibi"}),
        ("longformer-lm", {"window": 3, "top_window": 5, "dilated_heads": 1}),
        ("linear-transformer", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("threshold", [0.4, 0.0])
def test_language_models_go_on_from_a_prompt(name: str, words: dict[str, Any], threshold: float) -> None:
    model = shaken(early_exit(mf.build(name, **SIZES, **words), threshold=threshold))
    tokens = torch.randint(0, 29, (4, LENGTH))
    with torch.inference_mode():
        state = model(tokens[:, :4], state=model.init_state(4, capacity=LENGTH)).state
    found = steps(model, tokens[:, 4:], state)
    torch.testing.assert_close(found, model(tokens).logits[:, 4:], rtol=1e-9, atol=1e-9)


def test_rows_do_leave_at_different_layers() -> None:
    """Otherwise none of this would be tested."""
    source, target = torch.randint(0, 29, (6, 7)), torch.randint(0, 29, (6, LENGTH))
    for words in (RULES[0], RULES[2], RULES[4], RULES[5]):
        depth = exits(translating(words), source, target)
        assert (depth.amax(0) != depth.amin(0)).sum() >= 3


def test_rows_can_be_exchanged_and_other_steps_taken_on_the_way() -> None:
    """What waits for upper layers goes with its row, and is taken in by whoever comes next."""
    model = translating(RULES[0])
    source, target, order = torch.randint(0, 29, (4, 7)), torch.randint(0, 29, (4, LENGTH)), torch.tensor([2, 0, 0])
    with torch.inference_mode():
        following, memory, state = bind(model), model.encode(source), model.init_state(4, capacity=LENGTH)
        for token in target[:, :5].split(1, dim=1):
            _, state = following(token, state, memory)
        assert min(state.body.done) < state.body.columns
        state, memory = tree_map(lambda t: t.index_select(0, order), (state, memory))
        mixed = torch.cat([target[order, :5], target[:3, 5:]], 1)
        # two at once are none of its business
        out = model.decode(mixed[:, 5:7], memory, None, state)
        logits, _ = following(mixed[:, 7:8], out.state, memory)
        expected = model.decode(mixed[:, :8], memory).logits
    torch.testing.assert_close(out.logits, expected[:, 5:7])
    torch.testing.assert_close(logits, expected[:, 7:])


def test_a_full_cache_still_says_so() -> None:
    model = translating(RULES[0])
    with torch.inference_mode(), pytest.raises(ValueError, match="created with capacity=2, but 3 tokens need space"):
        steps(
            model,
            torch.zeros(1, 3, dtype=torch.long),
            model.init_state(1, capacity=2),
            model.encode(torch.ones(1, 2).long()),
        )


@pytest.mark.parametrize("width", [None, 3])
def test_generated_texts_are_those_without_a_cache(width: int | None) -> None:
    model = translating(RULES[0])
    rows = [torch.randint(3, 29, (n,)).tolist() for n in (4, 7, 2)]
    found = []
    for cached in (True, False):
        decoding = Decoding(max_new=9, use_cache=cached) if width is None else Decoding(
            choice=BeamSettings(width), max_new=9, use_cache=cached
        )  # fmt: skip
        found.append(generate(model, rows, decoding=decoding).tokens)
    assert found[0] == found[1]


def test_what_nobody_needs_costs_nothing() -> None:
    """With all leaving after layer n, a step costs n layers; with rows that differ, hardly more than their mean."""

    def cost(threshold: Any, rows: int = 8) -> int:
        model = early_exit(mf.build("transformer", **SIZES), rule="geometric", threshold=threshold).eval()
        with torch.inference_mode():
            following, state = bind(model), model.init_state(rows, capacity=4)
            memory, token = model.encode(torch.ones(rows, 3).long()), torch.ones(rows, 1).long()
            _, state = following(token, state, memory)
            return count_flops(lambda: following(token, state, memory))

    one, two, three = cost((0.0,) * 4), cost((2.0, 0.0, 0.0, 0.0)), cost((2.0, 2.0, 0.0, 0.0))
    assert three - two == two - one
    assert cost(2.0) - three == pytest.approx(2 * (two - one), rel=0.02)


def test_copies_wait_until_somebody_comes() -> None:
    model = translating({"rule": "geometric", "threshold": 0.0})
    with torch.inference_mode():
        following, memory, state = bind(model), model.encode(torch.ones(2, 3).long()), model.init_state(2, capacity=6)
        for _ in range(4):
            _, state = following(torch.ones(2, 1).long(), state, memory)
        assert state.body.done == (4, 0, 0, 0, 0)
        model.decoder.rule.values = (2.0, 2.0, 0.0, 0.0)
        _, state = following(torch.ones(2, 1).long(), state, memory)
        assert state.body.done == (5, 5, 5, 0, 0)
