"""Attention residuals against a softmax over a list of all that was computed, and the class of transformers."""

import pytest
import torch
from stream_rules import branch_outputs, run_rule, shaken
from torch import Tensor

from manyformer.nn.streams import AttentionResiduals, SourceQuery
from manyformer.nn.streams.attention_residuals import DepthSource

DIM = 6
BRANCHES = (2, 3, 1, 2, 2)


def read_by_definition(query: SourceQuery, sources: list[Tensor]) -> Tensor:
    """Section 3 of Kimi 2026: keys are normalized, values are not, and no 1 / sqrt(d)."""
    values = torch.stack(sources, 2)
    keys = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt() * query.key_gain
    weights = torch.einsum("blsd,d->bls", keys, query.query).softmax(-1)
    return torch.einsum("bls,blsd->bld", weights, values)


def by_definition(rule: AttentionResiduals, x: Tensor, block_layers: int | None) -> Tensor:
    """Every reader gets a list: the embedding, sums of complete blocks, and the sum of the current block so far."""
    blocks = [[x]]
    number = 0
    for layer, branch_count in enumerate(BRANCHES):
        begins_block = block_layers is not None and layer % block_layers == 0
        for branch in range(branch_count):
            sources = [sum(block[1:], block[0]) for block in blocks]
            branch_input = sources[0]
            if number:
                branch_input = read_by_definition(rule.layers[layer][str(branch)], sources)  # type: ignore[index]
            y = branch_outputs(number, branch_input)
            if block_layers is None or (begins_block and branch == 0):
                blocks.append([y])
            else:
                blocks[-1].append(y)
            number += 1
    return read_by_definition(rule.end, [sum(block[1:], block[0]) for block in blocks])


@pytest.mark.parametrize("block_layers", [None, 1, 2, 3, 9])
def test_outputs_and_gradients_are_those_of_the_definition(block_layers: int | None) -> None:
    rule = shaken(AttentionResiduals(DIM, BRANCHES, block_layers=block_layers))
    x = torch.randn(2, 5, DIM, dtype=torch.double, requires_grad=True)
    results = []
    for y in (run_rule(rule, x, BRANCHES), by_definition(rule, x, block_layers)):
        gradients = torch.autograd.grad(y.sin().sum(), [x, *rule.parameters()])
        results.append([y, *gradients])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_branches_read_the_mean_of_all_sources_at_first() -> None:
    sources = [torch.randn(1, 3, DIM) for _ in range(4)]
    weights = SourceQuery(DIM)([DepthSource.of(source) for source in sources])
    torch.testing.assert_close(weights, torch.full((1, 3, 4), 0.25), rtol=0, atol=0)


def test_sources_of_length_one_are_weighted_as_by_the_class_of_inkling() -> None:
    """That class normalizes values too and divides scores by sqrt(d): of normalized sources it is the paper's form."""
    modelling = pytest.importorskip(
        "transformers.models.inkling2.modeling_inkling2", reason="this transformers has no attention residuals"
    )
    config = modelling.Inkling2TextConfig(hidden_size=DIM)
    config._attn_implementation = "eager"
    theirs = modelling.Inkling2BlockAttentionResidual(config)
    query = torch.randn(DIM)
    states = torch.randn(2, 5, 4, DIM)
    ours = AttentionResiduals(DIM, (3,))
    with torch.no_grad():
        theirs.query.copy_(query)
        ours.end.query.copy_(query / DIM**0.5)
        expected = theirs(states[..., :-1, :], states[..., -1, :])[0]
        sources = [DepthSource.of(theirs.norm(states[..., number, :])) for number in range(4)]
        streams = ours.start(sources[0].value)._replace(complete=tuple(sources))
        torch.testing.assert_close(ours.finish(streams), expected, rtol=0, atol=1e-5)
