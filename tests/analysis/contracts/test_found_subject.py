"""Strangers' modules behind `check`, without an adapter: what is right is green, what is wrong is red."""

import warnings
from typing import Any

import pytest
import torch
from strangers import STRANGERS, LastAlone, LongConvolution, OneToken, PaddedConvolution
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts import Adapter
from manyformer.analysis.contracts.found_subject import FoundSubject
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
    assert "parameters that are perturbed hide this" in report["causal"].sentence
    adapted = Adapter(logits=Attention(masked=False), vocab=VOCAB)
    assert not mf.check(adapted, only=["causal"]).ok
    report = mf.check(Attention(masked=False), only=["causal"], causal=False)
    assert report.rows[0].verdict == "not promised"


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


SLOW = {LastAlone, OneToken}
"""A call for each token takes seconds."""


@pytest.mark.parametrize("model", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in STRANGERS])
def test_a_sound_stranger_is_red_or_a_fault_green(model: Any) -> None:
    form, cache, red = STRANGERS[model]
    # no longer than the shortest limit of them all: what has no limit takes seconds at 2048 tokens
    subject = FoundSubject(model(), max_length=96)
    assert subject.found.form.name == form
    assert (None if isinstance(subject.cache, str) else subject.cache.form.name) == cache
    report = mf.check(subject, skip=SKIP)
    assert {row.contract for row in report.failed} == set(red), report.table()
    # what is right is shown, not left out
    assert report["batch"].verdict == "passed"
    assert report["causal"].verdict in ("passed", "failed") or model is LastAlone


def test_a_gradient_from_the_future_hides_at_the_greatest_length() -> None:
    """A filter of the greatest length wraps around in the transform of a short sequence, and in none of that length."""
    row = mf.check(LongConvolution(), only=["causal-gradient"])["causal-gradient"]
    assert row.verdict == "failed", row.sentence
    row = mf.check(PaddedConvolution(), only=["causal-gradient"])["causal-gradient"]
    assert row.verdict == "passed", row.sentence
    assert row.sentence.endswith("at 128 tokens and at 64"), row.sentence


def test_logits_of_the_last_token_alone_are_not_called_for_each_prefix() -> None:
    report = mf.check(LastAlone(), only=["repeatable", "causal"], length=12)
    assert [row.verdict for row in report.rows] == ["passed", "not promised"]
    assert "last token alone" in report.assumptions[0]


class TwoRows(Attention):
    def forward(self, idx: Tensor) -> Tensor:
        if idx.shape[0] > 2:
            raise ValueError("memory for two rows")
        return super().forward(idx)


def test_more_rows_than_a_module_takes_are_passed_to_it() -> None:
    report = mf.check(TwoRows(), only=["causal", "batch"])
    assert [row.verdict for row in report.rows] == ["passed", "passed"]
    assert "at most 2 rows" in report.assumptions[0]


class Convolution(Attention):
    """A causal convolution by a Fourier transform in float32, which rounds with all tokens."""

    def __init__(self, *, padded: bool) -> None:
        super().__init__()
        self.padded = padded
        self.filter = nn.Parameter(torch.randn(WIDTH, 2048))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx).mT.float()
        length = x.shape[-1]
        size = 2 * length if self.padded else length
        spectrum = torch.fft.rfft(x, n=size) * torch.fft.rfft(self.filter[:, :length].float(), n=size)
        mixed = torch.fft.irfft(spectrum, n=size)[..., :length].mT.to(self.head.weight.dtype)
        logits: Tensor = self.head(mixed)
        return logits


@pytest.mark.parametrize("padded", [True, False])
def test_rounding_of_a_fourier_transform_is_a_leak_or_its_wrapping_is_none(padded: bool) -> None:
    names = ["causal", "causal-training", "causal-gradient"]
    report = mf.check(Convolution(padded=padded), only=names, max_length=256)
    assert [row.verdict for row in report.rows] == ["passed" if padded else "failed"] * 3, report.table()


def test_exported_and_scripted_programs_are_not_called() -> None:
    module = Attention().eval()
    tokens = torch.zeros(2, 32, dtype=torch.long)
    program = torch.export.export(module, (tokens,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(module)
    for model in (program, scripted):
        report = mf.check(model, only=["causal", "causal-training", "batch"])
        assert report.ok, report.table()
        assert report["causal"].verdict == "passed"
    leaking = torch.export.export(Attention(masked=False).eval(), (tokens,))
    report = mf.check(leaking, only=["causal"])
    assert not report.ok
    assert (report.lengths.long, report.lengths.probe) == (32, None)
