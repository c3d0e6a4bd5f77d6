"""Modules of the caller's own beside recipes: compared at an equal budget in Python and by a file, and scored."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import import_commands
from manyformer.cli.app import app
from manyformer.training import silent

VOCAB = 11
ROWS = torch.randint(VOCAB, (24, 9), generator=torch.Generator().manual_seed(0))
DATA = list(ROWS.split(8))


class Bag(nn.Module):
    def __init__(self, vocab_size: int, dim: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


SOURCE = """
from torch import nn
class Bag(nn.Module):
    def __init__(self, vocab_size, dim=8):
        super().__init__()
        self.table, self.head = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)
    def forward(self, tokens):
        return self.head(self.table(tokens))
"""
SETTINGS = {"limits": {"steps": 6}, "schedule": {"name": "constant", "warmup": 0}}


def test_cases_in_python_have_the_scores_of_their_own_trainings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    built = Bag(VOCAB)
    before = {name: value.clone() for name, value in built.state_dict().items()}
    llama = {"recipe": "llama", "model": {"vocab": VOCAB, "dim": 8, "depth": 1, "heads": 2}}
    cases = {"built": built, "made": lambda: Bag(VOCAB), "llama": llama}
    call: dict[str, Any] = {"data": DATA, "eval_data": DATA[:1], "score": ["loss", "accuracy"], "seeds": 2}
    result = mf.compare(cases, SETTINGS, out=tmp_path / "all", **call)
    torch.testing.assert_close(dict(built.state_dict()), before)
    alone = mf.train(
        built, {**SETTINGS, "out": str(tmp_path / "alone")}, data=DATA, eval_data=DATA[:1], on_event=silent
    )
    assert result.values("built", "loss") == pytest.approx([alone.scores["loss"]] * 2)
    assert result.values("built", "accuracy")[0] == pytest.approx(100 * alone.scores["accuracy"])
    # a function gives other weights for another seed
    assert len(set(result.values("made", "loss"))) == 2
    # each case has seen as many targets as every other one
    assert {measurement.tokens for measurement in result.measurements} == {6 * 8 * 8}
    assert str(result).splitlines()[2].split()[0] == "case"
    assert result.picture is not None
    assert result.picture.read_bytes().startswith(b"\x89PNG")
    # finished trainings are read, not repeated
    again = mf.compare(cases, SETTINGS, out=tmp_path / "all", **call)
    assert again.measurements == result.measurements
    with pytest.raises(UserError, match="was trained with other settings or another budget"):
        mf.compare(cases, SETTINGS, out=tmp_path / "all", **{**call, "data": DATA[1:]})


def test_one_command_compares_a_class_in_a_file_with_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bag_of_mine.py").write_text(SOURCE)
    (tmp_path / "mine.yaml").write_text(
        "title: a bag and llama\n"
        "run: {data: {kind: synthetic, rule: copy, valid: 8}, limits: {steps: 2}, batch: {tokens: 256}}\n"
        "cases:\n"
        '  bag: {recipe: "bag_of_mine.py:Bag", model: {dim: 12}}\n'
        "  llama: {recipe: llama, model: {dim: 8, depth: 1, heads: 2}}\n"
    )
    import_commands()
    done = CliRunner().invoke(app, ["compare", "mine.yaml", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "comparisons" / "mine" / "results.json").read_text())
    bag, llama = result["measured"]
    assert (bag["case"], llama["case"]) == ("bag", "llama")
    # the vocabulary of the data, by the name that the class has for it
    vocab = bag["parameters"] // (2 * 12 + 1)
    assert bag["parameters"] == vocab * (2 * 12 + 1)
    assert bag["tokens"] == llama["tokens"] > 0
    assert abs(bag["scores"][0]["loss"] - llama["scores"][0]["loss"]) < 2


def test_scores_of_batches_are_those_of_the_logits() -> None:
    torch.manual_seed(1)
    module = Bag(VOCAB)
    logits = module(ROWS[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), ROWS[:, 1:].flatten()).item()
    evaluation = mf.evaluate(module, DATA)
    assert evaluation["loss"].value == pytest.approx(expected, rel=1e-5)
    assert evaluation["accuracy"].value == pytest.approx((logits.argmax(-1) == ROWS[:, 1:]).float().mean().item())
    assert module.training
    ours = mf.build("llama", vocab=VOCAB, dim=8, depth=1, heads=2)
    logits = ours(ROWS[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), ROWS[:, 1:].flatten()).item()
    assert mf.evaluate(ours, data=iter(DATA))["loss"].value == pytest.approx(expected, rel=1e-5)


REFUSALS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no held-out data": ([Bag], {"data": DATA}, "data= needs eval_data="),
    "one name twice": ([Bag, Bag], {"data": DATA, "eval_data": DATA}, "two cases are called Bag"),
    "no cases": ([], {}, "there are no cases"),
    "an iterator": ([lambda: Bag(VOCAB)], {"data": iter(DATA), "eval_data": DATA}, "data can be read only once"),
    "a case without a recipe": ({"a": {"model": {}}}, {"data": DATA, "eval_data": DATA}, "the case a needs a recipe"),
    "several processes": ([Bag], {"jobs": 2, "data": DATA, "eval_data": DATA}, "jobs=2 starts processes"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mistake_in_own_cases_is_named_in_a_sentence(name: str, tmp_path: Path) -> None:
    cases, keywords, sentence = REFUSALS[name]
    with pytest.raises(UserError) as refused:
        mf.compare(cases, {"limits": {"steps": 1}}, out=tmp_path / "out", **keywords)
    assert sentence in str(refused.value)
    assert not (tmp_path / "out").exists()
