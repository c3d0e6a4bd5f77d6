"""Tokens that a call makes global, and parts that it names, in the encoders that ask for them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.nn.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.nn.core import GLOBAL_ROLE, PADDING_SEGMENT
from perturbing import perturb

SMALL = {"vocab": 23, "dim": 16, "heads": 2, "depth": 1, "ff_dim": 24, "dropout": 0.0}
ENCODERS: dict[str, dict[str, Any]] = {
    "longformer": {"window": 2, "global_tokens": None, "max_length": 64},
    "bigbird": {"block": 4, "random": None, "max_length": 64},
    "bigbird-etc": {"block": 4, "summaries": 2},
    "etc": {"window": 2, "part_length": 8},
}


def built(name: str) -> Any:
    model: Any = mf.build(name, **SMALL, **ENCODERS[name])
    perturb(model.double(), 0.2)
    return model.eval()


def depends(model: Any, on: int, roles: Tensor | None) -> list[int]:
    """Which tokens' logits change with the token at `on`, of those that one layer brings together."""
    tokens = torch.randint(5, 23, (1, 40))
    other = tokens.clone()
    other[0, on] = (tokens[0, on] - 4) % 18 + 5
    with torch.no_grad():
        change = (model(tokens, None, roles).logits - model(other, None, roles).logits).abs().amax(-1)[0]
    return (change > 1e-12).nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ENCODERS)
def test_a_global_token_sees_all_and_is_seen_by_all(name: str) -> None:
    model, roles = built(name), torch.zeros(1, 40, dtype=torch.long)
    roles[0, 21] = GLOBAL_ROLE
    assert depends(model, 21, roles) == list(range(40))
    assert 21 in depends(model, 5, roles)
    assert 21 not in depends(model, 5, None)
    assert 36 not in depends(model, 21, None)


@pytest.mark.parametrize("name", ENCODERS)
def test_roles_travel_with_padding_and_packing(name: str) -> None:
    model, tokens = built(name), torch.randint(5, 23, (1, 30))
    roles = (torch.rand(1, 30) < 0.2).long()
    segments = torch.tensor([[0] * 13 + [1] * 14 + [PADDING_SEGMENT] * 3])
    with torch.no_grad():
        actual = model(tokens, segments, roles).logits
        for cut in (slice(0, 13), slice(13, 27)):
            alone = model(tokens[:, cut], None, roles[:, cut]).logits
            torch.testing.assert_close(actual[:, cut], alone, atol=1e-10, rtol=0)
        none = model(tokens, None, torch.zeros_like(tokens)).logits
        torch.testing.assert_close(none, model(tokens).logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ENCODERS)
def test_training_and_scoring_take_them(name: str) -> None:
    model, tokens = built(name), torch.randint(5, 23, (2, 30))
    roles = torch.zeros_like(tokens)
    roles[:, 3] = GLOBAL_ROLE
    targets = torch.where(torch.rand(2, 30) < 0.3, tokens, IGNORE_INDEX)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            model(tokens, None, roles).logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        batch = MaskedLMBatch(tokens, targets, roles=roles)
        torch.testing.assert_close(model.loss(batch).total, expected)
        torch.testing.assert_close(model.score(batch).nll, expected, check_device=False)


def test_parts_are_what_a_call_says() -> None:
    model, tokens = built("etc"), torch.randint(5, 23, (1, 30))
    with torch.no_grad():
        usual = model(tokens).logits
        same = model(tokens, None, None, torch.arange(30)[None] // 8).logits
        other = model(tokens, None, None, torch.arange(30)[None] // 5).logits
    torch.testing.assert_close(same, usual, atol=1e-10, rtol=0)
    assert (other - usual).abs().max() > 1e-4


@pytest.mark.usefixtures("unchecked")
def test_who_does_not_ask_refuses() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    bert: Any = mf.build("bert", **SMALL, max_length=8)
    with pytest.raises(ValueError, match="this model does not use the roles of tokens"):
        bert(tokens, None, tokens)
    longformer = built("longformer")
    with pytest.raises(ValueError, match="this model does not use the parts of tokens"):
        longformer(tokens, None, None, tokens)
    with pytest.raises(ValueError, match=r"roles \(1, 3\) must have the shape of the tokens \(1, 4\)"):
        longformer(tokens, None, tokens[:, :3])
