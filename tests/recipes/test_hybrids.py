"""Hybrids: layers of several kinds by a pattern, and attention whose outputs are gated."""

from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face.families.llama import LLAMA
from manyformer.nn.core import state_bytes
from manyformer.nn.positions import NoPosition, RotaryPosition

SMALL: dict[str, Any] = {"vocab": 11, "dim": 16, "heads": 2, "position": "rope"}
CONTRACTS = ["causal", "cached", "padding-state", "packing-state", "beams"]


@pytest.mark.parametrize(
    ("pattern", "kernel", "depth"),
    [("DDF", "softmax", 4), ("KNDF", "linear", 3), ("KN", "window", 2), ("PEF", "softmax", 3)],
)
def test_hybrids_keep_their_promises(pattern: str, kernel: str, depth: int) -> None:
    model = mf.build("compose", **SMALL, depth=depth, pattern=pattern, kernel=kernel)
    report = mf.check(model, only=CONTRACTS, length=16)
    assert report.ok, report.table()


def test_layers_are_those_of_their_letters_and_full_ones_alone_cache_tokens() -> None:
    model: Any = mf.build("compose", **SMALL, depth=5, pattern="KNDF", kernel="linear")
    layers = [model.get_submodule(f"body.{number}.attention.inner") for number in range(5)]
    assert [type(layer.kernel).__name__[:7] for layer in layers] == [
        "LinearK",
        "Softmax",
        "LinearK",
        "Softmax",
        "LinearK",
    ]
    assert [isinstance(layer.position, RotaryPosition) for layer in layers] == [True, False, False, True, True]
    assert isinstance(layers[1].position, NoPosition)
    with torch.no_grad():
        sizes = [
            state_bytes(model(torch.zeros(1, n, dtype=torch.long), state=model.init_state(1)).state) for n in (8, 9)
        ]
    # keys and values of two layers, and the position and segment of the token
    assert sizes[1] - sizes[0] <= 2 * (2 * 16 * 4 + 2 * 8)
    assert sizes[1] - sizes[0] >= 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"pattern": "KX"}, r"pattern \('KX'\) must have one letter or more, of K, F, N, D, P, E"),
        ({"pattern": ""}, "one letter or more"),
        ({"pattern": "KN", "position": "sinusoid"}, "position sinusoid is none of single layers"),
        ({"pattern": "DF", "kernel": "linear"}, "kernel linear is that of layers K"),
    ],
)
def test_patterns_that_leave_something_out_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mf.build("compose", **(SMALL | keywords), depth=2)


def test_the_gate_of_llama_multiplies_the_outputs_of_heads() -> None:
    """An open gate of 1/2 everywhere halves what attention adds; no class has it without what else Qwen3-Next has."""
    sizes: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 1, "heads": 2}
    gated: Any = mf.build("llama", **sizes, output_gate=True)
    plain: Any = mf.build("llama", **sizes)
    plain.load_state_dict(gated.state_dict(), strict=False)
    with torch.no_grad():
        gated.get_submodule("body.0.attention.inner.output_stage.gate.up").weight.zero_()
        plain.get_submodule("body.0.attention.inner.out_proj").weight.mul_(0.5)
    tokens = torch.randint(0, 11, (2, 9))
    torch.testing.assert_close(gated(tokens).logits, plain(tokens).logits)
    with pytest.raises(UserError, match="output_gate is True"):
        LLAMA.write_config({**gated.spec.keywords, "ff_dim": 48})
