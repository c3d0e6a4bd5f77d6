"""`check` takes names, folders, models and adapters, says what is wrong with anything else, and leaves no trace."""

import random
from pathlib import Path
from typing import Any

import mutants
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts import CONTRACTS, Adapter, ContractRow
from manyformer.analysis.contracts.causality_contracts import cut_positions
from manyformer.analysis.own_models import TINY_KEYWORDS
from manyformer.base.errors import UserError
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.recipes import RECIPES, recipe

VOCAB = 31


class Recurrent(nn.Module):
    """A foreign model: a GRU, which streams by nature."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(VOCAB, 12),
            nn.GRU(12, 12, batch_first=True),
            nn.Linear(12, VOCAB),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.step(tokens, None)[0]

    def step(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        before = None if state is None else state.transpose(0, 1).contiguous()
        y, after = self.body(self.embed(tokens), before)
        return self.head(y), after.transpose(0, 1)


class Bag(nn.Module):
    """A foreign encoder: each token and the mean of all real ones of its document."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        segments = torch.zeros_like(tokens) if segments is None else segments
        same = ((segments[:, :, None] == segments[:, None]) & (segments[:, None] >= 0)).to(x.dtype)
        return self.head(x + same @ x / same.sum(-1, keepdim=True).clamp(min=1))


def verdicts(report: Any) -> dict[str, str]:
    return {row.contract: row.verdict for row in report.rows}


def test_three_lines_are_enough_for_a_third_party_module() -> None:
    net = Recurrent()
    report = mf.check(Adapter(logits=lambda tokens: net(tokens), vocab=VOCAB), skip=["compile"], length=48)
    assert report.ok, report.table()
    actual = verdicts(report)
    assert {name for name, verdict in actual.items() if verdict == "passed"} == {
        "repeatable",
        "seed",
        "traceless",
        "causal",
        "length",
        "causal-autocast",
        "causal-gradient",
        "batch",
    }
    assert report["cached"].sentence == "not promised: the adapter has no `step`"
    assert report["gradients"].sentence == "not promised: the adapter has no `module`"


def test_what_else_an_adapter_gives_is_checked_too() -> None:
    net = Recurrent()
    report = mf.check(Adapter(logits=net, vocab=VOCAB, step=net.step), skip=["compile"], length=48)
    assert report.ok, report.table()
    actual = verdicts(report)
    for name in ("cached", "prefill", "beams", "gradients", "float64", "bfloat16"):
        assert actual[name] == "passed", report[name]
    assert report.subject == "Recurrent"


def test_an_adapter_that_starts_from_nothing_is_told_from_one_that_forgets() -> None:
    net = Recurrent()
    adapter = Adapter(logits=net, vocab=VOCAB, step=lambda tokens, state: net.step(tokens, None))
    assert {row.contract for row in mf.check(adapter, skip=["compile"], length=48).failed} == {
        "cached",
        "prefill",
        "beams",
    }


def test_an_encoder_is_held_to_padding_and_packing_but_not_to_causality() -> None:
    net = Bag()
    adapter = Adapter(
        logits=net, vocab=VOCAB, causal=False, padding=lambda tokens, real: net(tokens, real.long() - 1), packing=net
    )
    report = mf.check(adapter, skip=["compile"])
    assert report.ok, report.table()
    actual = verdicts(report)
    assert actual["causal"] == actual["cached"] == "not promised"
    assert actual["padding-left"] == actual["padding-right"] == actual["packing"] == actual["empty-rows"] == "passed"


def test_lengths_are_multiples_of_what_an_adapter_asks_for() -> None:
    seen: list[int] = []
    net = Bag()

    def logits(tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[1])
        return net(tokens)

    adapter = Adapter(logits=logits, vocab=VOCAB, causal=False, length_multiple=10, max_length=64)
    mf.check(adapter, skip=["compile"])
    assert set(seen) == {10, 50, 60}


def test_invalid_adapters_are_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="vocab \\(1\\) must be at least 2"):
        mf.check(Adapter(logits=lambda tokens: tokens, vocab=1))
    report = mf.check(Adapter(logits=lambda tokens: tokens, vocab=VOCAB), only=["repeatable"])
    assert "must give logits (2, 48, 31) for tokens (2, 48), it gave (2, 48)" in report["repeatable"].sentence


def test_an_error_of_the_model_is_a_failure_with_its_words() -> None:
    def broken(tokens: Tensor) -> Tensor:
        raise RuntimeError("no such   kernel")

    report = mf.check(Adapter(logits=broken, vocab=VOCAB), only=["batch"])
    assert not report.ok
    assert report["batch"].sentence == "raised RuntimeError: no such kernel"


def test_names_keywords_and_folders(tmp_path: Path) -> None:
    some = ["repeatable", "saving", "spec"]
    report = mf.check("transformer-lm", only=some, keywords={"norm_order": "post"})
    assert report.ok
    assert report.subject == "transformer-lm"
    model = mutants.language_model()
    model.save(tmp_path / "run" / "model")
    assert mf.check(tmp_path / "run", only=some).ok
    assert mf.check(str(tmp_path / "run" / "model"), only=some).subject.endswith("model")
    assert mf.check(model, only=some).ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "transformer-lmm"}, "neither a recipe nor a folder with a model; did you mean transformer-lm"),
        ({"model": nn.Linear(2, 2)}, r"mf.check\(Adapter\(logits="),
        ({"model": "bert", "only": ["casual"]}, "no contract 'casual'; did you mean causal"),
        ({"model": "bert", "skip": ["compiled"]}, "did you mean compile"),
        ({"model": "bert", "length": 11}, r"length \(11\) must be from 12 to 128 tokens"),
        ({"model": "bert", "length": 129}, r"length \(129\) must be from 12 to 128 tokens"),
        ({"model": "compose", "length": 1}, "must be at least 12 tokens"),
        ({"model": "bert", "keywords": {"max_length": 8}}, "allows at most 8 tokens, too few to check"),
        ({"model": "bert", "keywords": {"depht": 8}}, "did you mean depth"),
        ({"model": mutants.language_model(), "keywords": {"depth": 1}}, "this model is built already"),
        ({"model": mutants.language_model(), "device": "cpu"}, "this model has a device already"),
    ],
)
def test_unknown_models_and_contracts_are_refused_in_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mf.check(**arguments)


def test_rows_arrive_one_by_one_in_the_order_of_the_report() -> None:
    heard: list[ContractRow] = []
    report = mf.check("transformer-classifier", skip=["compile"], on_row=heard.append)
    assert tuple(heard) == report.rows
    assert [row.contract for row in heard] == [name for name in CONTRACTS if name not in {"compile", "learns"}]


def test_the_same_seed_gives_the_same_report_and_another_does_not() -> None:
    kinds = ["float64", "bfloat16", "padding-left"]
    first, again, other = (mf.check("compose", seed=seed, only=kinds) for seed in (1, 1, 2))
    assert first == again
    assert first.rows != other.rows


def test_a_check_leaves_the_model_and_the_process_as_they_were() -> None:
    model = mutants.language_model(mutants.Shift())
    model.train()
    model.body.eval()
    weight = model.embed.token.weight
    weight.grad = torch.full_like(weight, 3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    drawn = torch.rand(3), np.random.rand(3), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    mf.check(model, skip=["compile"])
    assert torch.equal(torch.rand(3), drawn[0])
    assert (np.random.rand(3) == drawn[1]).all()
    assert random.random() == drawn[2]
    assert model.training
    assert not model.body.training
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    assert all(other.grad is None for other in model.parameters() if other is not weight)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items())


def test_a_card_excuses_by_promise_or_by_contract_and_by_nothing_else() -> None:
    facts: dict[str, Any] = {"paper": "none", "summary": "none", "task": LANGUAGE_MODELLING, "cost": "O(1)"}

    def enter(**because: str) -> None:
        @recipe("Excused", reasons={"cross_attention": "one sequence", **because}, **facts)
        def excused() -> Any:
            return mutants.language_model()

    try:
        enter(rewind="its memory is written in place")
        report = mf.check("excused", only=["rewind", "cached"])
        assert report["rewind"] == ContractRow("rewind", "not promised", "not promised: its memory is written in place")
        assert report["cached"].verdict == "passed"
        enter(rewnid="a slip")
        with pytest.raises(UserError, match="has a reason for 'rewnid'"):
            mf.check("excused")
    finally:
        del RECIPES["excused"]


def test_tiny_models_are_perturbed_in_every_parameter() -> None:
    from manyformer.analysis.own_models import build_tiny

    torch.manual_seed(0)
    model = build_tiny("bert", {}, 0)
    assert model.spec.keywords.items() >= (TINY_KEYWORDS | {"vocab": 29}).items() - {("classes", 3)}
    for name, weight in model.named_parameters():
        assert weight.unique().numel() > 1, f"{name} is still constant"


@pytest.mark.parametrize("length", [12, 48, 100, 128, 512])
def test_cuts_are_at_both_ends_and_around_powers_of_two(length: int) -> None:
    class Fake:
        generator = torch.Generator().manual_seed(0)

    cuts = cut_positions(Fake(), length)  # type: ignore[arg-type]
    assert cuts[0] == 1
    assert cuts[-1] == length - 1
    assert cuts == sorted(set(cuts))
    around = {power + by for power in (2**n for n in range(2, 10)) for by in (-1, 0, 1)}
    assert len(around & set(cuts)) >= min(6, len(cuts) - 2)


def test_a_contract_that_is_not_promised_may_be_measured_anyway() -> None:
    """A language model that says it is not causal is still told by how much."""
    row = mf.check("reformer", only=["causal", "causal-gradient", "cached"], length=48)["causal"]
    assert row.verdict == "not promised"
    assert "shift the chunk boundaries" in row.sentence
    assert "; measured: the future leaks: token" in row.sentence
    assert row.measured is not None
    assert row.measured > 1e-4
