"""The matrix of recipes in other tools: some cells of it, and that a wrong cell is found. CI computes a tenth of it."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from other_tools import wrappers  # noqa: E402 - scripts of that folder
from other_tools.cells import COLUMNS, ToolCell  # noqa: E402 - scripts of that folder
from other_tools.comparisons import WrongResult  # noqa: E402
from other_tools.processes import in_two_processes  # noqa: E402
from other_tools.subject import Subject, one_pass  # noqa: E402

QUICK = ["own loop", "bf16", "meta", "functional_call", "second derivative", "vmap gradients", "make_fx", "weight_norm"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", ["llama", "mamba-2", "transformer"])
def test_a_recipe_is_right_in_other_tools(recipe: str) -> None:
    for column in QUICK:
        assert ToolCell(recipe, column).result() == {"result": "right"}, column


@pytest.mark.parametrize(
    ("recipe", "column"), [("rwkv-7", "FSDP2"), ("spalm", "DDP"), ("transformer-xl", "dcp"), ("mixtral", "dcp")]
)
def test_two_processes_are_right(recipe: str, column: str) -> None:
    assert ToolCell(recipe, column).run(120) == {"result": "right"}


def test_a_wrong_cell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.calls = 0

        def forward(self, *inputs: torch.Tensor) -> object:
            output = self.model(*inputs)
            self.calls += 1
            # every call but the first is a little off
            return output._replace(logits=output.logits + 0.001 * (self.calls > 1))

    plain = Subject.model
    monkeypatch.setattr(Subject, "inputs", lambda self, model, **options: (torch.arange(12).view(2, 6),))
    monkeypatch.setattr(Subject, "model", lambda self, **keywords: Shifted(plain(self, **keywords)))
    with pytest.raises(WrongResult, match="with hooks"):
        COLUMNS["hooks"](Subject("llama"))


def test_what_is_wrong_in_the_second_process_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(subject: Subject, rank: int) -> None:
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        if rank + total == 2:
            raise WrongResult("1 apart")

    monkeypatch.setitem(COLUMNS, "DDP", in_two_processes(compute))
    result = ToolCell("llama", "DDP").run(60)
    assert result == {"result": "wrong", "words": "in the second process alone: WrongResult: 1 apart"}


def test_a_layer_whose_mask_is_not_seen_in_decoding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "decoded_of", lambda model, example: plain)
    subject = Subject("llama")
    plain = one_pass(subject.model().double(), subject.example(subject.model()))
    with pytest.raises(WrongResult, match="single tokens"):
        COLUMNS["pruning"](subject)


def test_no_kept_cell_is_wrong() -> None:
    kept = json.loads((BENCHMARKS.parent / "docs" / "in_other_tools.json").read_text())
    assert [(name, column) for name, row in kept.items() for column in row if row[column]["result"] == "wrong"] == []
