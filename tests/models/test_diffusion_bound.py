"""The bound of a masked diffusion, by exact enumeration of a model that is a table, and its loss by a naive loop."""

import math
from itertools import permutations, product

import numpy as np
import pytest
import torch
from tabular_diffusion import TabularDiffusion, nats_of_counts, nats_of_orders
from torch import Tensor
from torch.testing import assert_close

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, MaskedDiffusionLM, Model, TokenEmbedding
from manyformer.models.noise import LLADA_SCHEDULE, MDLM_SCHEDULE, NoiseSchedule
from manyformer.nn.attention.attention import Attention
from manyformer.nn.batches import IGNORE_INDEX, NoisedBatch
from manyformer.nn.core import PADDING_SEGMENT, Chain
from manyformer.nn.masks import Causal
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes import build

TEXT = (2, 1, 3, 1)
LENGTH = len(TEXT)


@pytest.fixture(scope="module")
def table() -> TabularDiffusion:
    return TabularDiffusion(4, LENGTH).double()


def batch_of(rows: int, noise: Tensor) -> NoisedBatch:
    tokens = torch.tensor([TEXT]).repeat(rows, 1)
    return NoisedBatch(tokens, tokens, noise)


def test_orders_and_counts_have_one_mean_which_is_above_the_likelihood(table: TabularDiffusion) -> None:
    orders = nats_of_orders(table, TEXT)
    bound = np.mean(orders)
    assert nats_of_counts(table, TEXT) == pytest.approx(bound, rel=1e-12)
    likelihood = -math.log(np.mean(np.exp(-np.array(orders))))
    assert likelihood < bound - 0.05


def test_the_score_over_all_noise_is_the_mean_over_all_orders(table: TabularDiffusion) -> None:
    # every order of the second numbers, at a level within each of the four parts that decide k
    numbers = torch.tensor(list(permutations([0.1, 0.3, 0.6, 0.8])))
    levels = torch.tensor([0.2, 0.3, 0.7, 0.9]).repeat_interleave(len(numbers))
    noise = torch.stack([levels[:, None].expand(-1, LENGTH), numbers.repeat(4, 1)], dim=-1)
    with torch.no_grad():
        score = table.eval().score(batch_of(len(noise), noise))
    assert float(score.nll) / len(noise) == pytest.approx(np.mean(nats_of_orders(table, TEXT)), rel=1e-6)
    assert int(score.others["hidden"]) == len(numbers) * (1 + 2 + 3 + 4)
    assert int(score.targets) == len(noise) * LENGTH


@pytest.mark.parametrize(
    ("schedule", "digits"),
    [(NoiseSchedule(0.0, 1.0), 1e-6), (MDLM_SCHEDULE, 3e-3), (LLADA_SCHEDULE, 3e-3)],
    ids=["from 0 to 1", "mdlm", "llada"],
)
def test_the_loss_integrated_over_levels_and_sets_is_the_bound(schedule: NoiseSchedule, digits: float) -> None:
    # the schedules of papers leave out the highest or the lowest thousandth of t
    model = TabularDiffusion(4, LENGTH, schedule).double()
    nodes, node_weights = np.polynomial.legendre.leggauss(20)
    levels = torch.tensor((nodes + 1) / 2)
    sets = torch.tensor(list(product([0.0, 1.0], repeat=LENGTH)), dtype=torch.float64)
    total = 0.0
    for level, node_weight in zip(levels, node_weights / 2):
        p = schedule.low + (schedule.high - schedule.low) * float(level)
        # a number of 0 hides at every level, one of 1 at none
        noise = torch.stack([level.expand_as(sets), 1 - sets], dim=-1)
        probabilities = p ** sets.sum(1) * (1 - p) ** (1 - sets).sum(1)
        nats = model.predict_hidden(batch_of(len(sets), noise), by_counts=False).weighted_nats().sum(1)
        total += node_weight * float((probabilities * nats.detach()).sum())
    assert total == pytest.approx(np.mean(nats_of_orders(model, TEXT)), rel=digits)


def packed_batch(generator: torch.Generator, vocab: int) -> NoisedBatch:
    """Two documents and padding in the first row, one document after padding in the second."""
    tokens = torch.randint(5, vocab, (2, 13), generator=generator)
    segments = torch.tensor([[0] * 6 + [1] * 5 + [PADDING_SEGMENT] * 2, [PADDING_SEGMENT] * 4 + [0] * 9])
    targets = tokens.masked_fill(segments == PADDING_SEGMENT, IGNORE_INDEX)
    targets[:, 6] = IGNORE_INDEX
    return NoisedBatch(tokens, targets, torch.rand(2, 13, 2, generator=generator).double(), segments)


@pytest.fixture(scope="module", params=["mdlm", "llada"])
def model(request: pytest.FixtureRequest) -> Model:
    return build(request.param, vocab=20, dim=16, depth=2, heads=2, dropout=0.0).double()


def naive_loss(model: MaskedDiffusionLM, batch: NoisedBatch) -> Tensor:
    """The loss of each document by itself, token by token."""
    assert batch.segments is not None
    total = torch.zeros((), dtype=torch.float64)
    is_mdlm = model.schedule == MDLM_SCHEDULE
    for row in range(len(batch.tokens)):
        for document in (0, 1):
            columns = (batch.segments[row] == document).nonzero()[:, 0]
            if not len(columns):
                continue
            u = float(batch.noise[row, columns[0], 0])
            t = 1e-3 + (1 - 1e-3) * u
            p, weight = ((1 - 1e-3) * t, 1 / t) if is_mdlm else (t, 1 / t)
            hidden = [
                number
                for number, column in enumerate(columns)
                if batch.noise[row, column, 1] < p and batch.targets[row, column] != IGNORE_INDEX
            ]
            noised = batch.tokens[row, columns].clone()
            noised[hidden] = model.mask_token
            logits = model(noised[None]).logits[0]
            others = [token for token in range(logits.shape[-1]) if token != model.mask_token]
            for number in hidden:
                log_probabilities = logits[number, others].log_softmax(-1)
                target = others.index(int(batch.tokens[row, columns[number]]))
                total = total - weight * log_probabilities[target]
    return total


def test_the_loss_of_packed_and_padded_rows_is_that_of_a_naive_loop(model: MaskedDiffusionLM) -> None:
    batch = packed_batch(torch.Generator().manual_seed(3), 20)
    loss = model.loss(batch)
    expected = naive_loss(model, batch)
    # of the 6, 5 and 9 tokens one in each row is given
    assert int(loss.targets) == 18
    assert_close(loss.total, expected, rtol=1e-12, atol=0)
    parameters = list(model.parameters())
    actual = torch.autograd.grad(loss.total, parameters)
    for gradient, wanted in zip(actual, torch.autograd.grad(expected, parameters), strict=True):
        assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


def test_given_tokens_and_mask_tokens_of_the_text_are_never_targets(model: MaskedDiffusionLM) -> None:
    generator = torch.Generator().manual_seed(4)
    batch = packed_batch(generator, 20)
    tokens = batch.tokens.clone()
    tokens[1, 8:10] = model.mask_token
    batch = batch._replace(tokens=tokens, targets=torch.where(batch.targets < 0, batch.targets, tokens))
    assert batch.segments is not None
    for by_counts in (True, False):
        hidden = model.predict_hidden(batch._replace(noise=batch.noise * 1e-6), by_counts=by_counts).hidden
        weights = hidden.weights
        assert not weights[batch.targets == IGNORE_INDEX].any()
        assert not weights[1, 8:10].any()
    passed = model.predict_hidden(batch.ignored(), by_counts=True)
    assert not bool(passed.weighted_nats().any())


def test_counts_are_those_of_each_document(model: MaskedDiffusionLM) -> None:
    batch = packed_batch(torch.Generator().manual_seed(5), 20)
    noise = batch.noise.clone()
    # a half of five, of five and of nine targets
    noise[..., 0] = 0.5
    hidden = model.predict_hidden(batch._replace(noise=noise), by_counts=True).hidden
    row, other = hidden.is_hidden
    counts = [int(row[:6].sum()), int(row[6:11].sum()), int(other.sum())]
    targets = [6, 4, 8]
    assert counts == [math.floor(n / 2) + 1 for n in targets]
    assert float(hidden.weights.sum()) == pytest.approx(sum(targets))


def test_the_mask_token_has_no_probability(model: MaskedDiffusionLM) -> None:
    tokens = torch.full((1, 5), model.mask_token)
    probabilities = model.token_logits(model(tokens).logits).softmax(-1)
    assert float(probabilities[..., model.mask_token].detach().abs().max()) == 0
    assert_close(probabilities.sum(-1), torch.ones(1, 5, dtype=torch.float64))


def test_smoothing_causal_attention_and_a_mask_beyond_the_vocabulary_are_refused(model: MaskedDiffusionLM) -> None:
    batch = packed_batch(torch.Generator().manual_seed(5), 20)
    with pytest.raises(UserError, match=r"label_smoothing \(0.1\) would make the loss of a diffusion no bound"):
        model.loss(batch, label_smoothing=0.1)
    body = Chain(attention=Attention(8, 2, SoftmaxKernel(Causal())))
    parts = (TokenEmbedding(9, 8), body, ClassHead(8, 9))
    with pytest.raises(UserError, match=r"attention of attention.kernel is causal \(Causal\(\)\).*from both sides"):
        MaskedDiffusionLM(*parts, MDLM_SCHEDULE, mask_token=4)
    with pytest.raises(UserError, match=r"mask_token \(20\) must be one of the tokens 0 to 19"):
        build("mdlm", vocab=20, dim=8, depth=1, heads=1, mask_token=20)
