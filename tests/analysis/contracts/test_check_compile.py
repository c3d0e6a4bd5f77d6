"""The contract about `torch.compile`, apart from the others because it takes seconds."""

import mutants
import torch

import manyformer as mf
from manyformer.analysis.contracts import Adapter


def test_compiled_code_that_differs_is_found(unchecked: None) -> None:
    row = mf.check(mutants.language_model(mutants.Traced()), only=["compile"])["compile"]
    assert row.verdict == "failed"
    assert "compiled, 48 tokens" in row.sentence


def test_what_torch_cannot_compile_at_all_is_no_success(unchecked: None) -> None:
    table = torch.nn.Embedding(7, 7)
    hidden = torch.compiler.disable(table.forward)
    row = mf.check(Adapter(logits=lambda tokens: hidden(tokens), vocab=7), only=["compile"])["compile"]
    assert (row.verdict, row.sentence) == ("failed", "torch compiled no graph")
