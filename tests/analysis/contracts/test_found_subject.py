"""Strangers' modules behind `check`, without an adapter: what is right is green, what is wrong is red."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.base.errors import UserError

VOCAB = 23
WIDTH = 16
SKIP = ("compile", "bfloat16")


class Attention(nn.Module):
    """One layer of attention with an output projection of zeros, as many begin."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked = masked
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        nn.init.zeros_(self.proj.weight)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        queries, keys, values = self.mix(x).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=self.masked)
        logits: Tensor = self.head(x + self.proj(mixed))
        return logits


def test_a_sound_module_is_red_or_changed_or_its_assumptions_are_not_told() -> None:
    module = Attention()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    report = mf.check(module, skip=SKIP)
    assert report.ok, report.table()
    assert report["causal"].verdict == "passed"
    assert "called as f(x)" in report.assumptions[0]
    assert report.assumptions[0] in report.table().replace("\n", " ")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert module.training


def test_zeros_behind_an_attention_hide_its_missing_mask() -> None:
    report = mf.check(Attention(masked=False), only=["causal", "causal-gradient"])
    assert [row.contract for row in report.failed] == ["causal", "causal-gradient"]
    told = mf.check(Attention(masked=False), only=["causal"], causal=False)
    assert told.rows[0].verdict == "not promised"


def test_what_no_form_fits_does_not_say_how_to_call_it() -> None:
    with pytest.raises(UserError, match=r"no known form of call .* of Linear: .*Adapter\(logits="):
        mf.check(nn.Linear(3, 3))


class Stacked(Attention):
    """Its cache stacks keys and values before the rows."""

    def forward(self, idx: Tensor, cache: Tensor | None = None, return_cache: bool = False) -> Any:  # type: ignore[override]
        x = self.wte(idx)
        queries, keys, values = self.mix(x).chunk(3, dim=-1)
        pairs = torch.stack([keys, values])
        if cache is not None:
            pairs = torch.cat([cache, pairs], dim=2)
        mask = torch.ones(idx.shape[1], pairs.shape[2], dtype=torch.bool).tril(pairs.shape[2] - idx.shape[1])
        mixed = nn.functional.scaled_dot_product_attention(queries, pairs[0], pairs[1], attn_mask=mask)
        logits = self.head(x + self.proj(mixed))
        return (logits, pairs) if return_cache else logits


def test_rows_behind_the_first_axis_of_a_cache_are_not_found() -> None:
    report = mf.check(Stacked(), only=["cached", "prefill", "beams"])
    assert [row.verdict for row in report.rows] == ["passed"] * 3, report.table()
