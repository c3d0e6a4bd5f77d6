"""Block diffusion: one pass over a noisy copy and its text equals a pass for each block; a cache changes nothing."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from manyformer.base.errors import UserError
from manyformer.inference.denoising import denoise
from manyformer.models import BlockDiffusionLM, ClassHead, Model, TokenEmbedding
from manyformer.models.noise import LLADA_SCHEDULE
from manyformer.nn.attention.attention import Attention
from manyformer.nn.batches import IGNORE_INDEX, NoisedBatch
from manyformer.nn.core import PADDING_SEGMENT, Chain
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes import build

VOCAB = 20


def model_of(block: int, **keywords: float) -> BlockDiffusionLM:
    torch.manual_seed(1)
    model = build("bd3-lm", vocab=VOCAB, dim=16, depth=2, heads=2, dropout=0.0, block=block, **keywords)
    assert isinstance(model, BlockDiffusionLM)
    return model


def packed_batch() -> NoisedBatch:
    """Documents of 7 and 4 tokens with padding, and one of 9 after padding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCAB, (2, 13), generator=generator)
    segments = torch.tensor([[0] * 7 + [1] * 4 + [PADDING_SEGMENT] * 2, [PADDING_SEGMENT] * 4 + [0] * 9])
    targets = tokens.masked_fill(segments == PADDING_SEGMENT, IGNORE_INDEX)
    targets[0, 0] = IGNORE_INDEX
    return NoisedBatch(tokens, targets, torch.rand(2, 13, 2, generator=generator).double(), segments)


def loss_block_by_block(model: BlockDiffusionLM, batch: NoisedBatch) -> Tensor:
    """The loss of each block of each document in a pass of its own, after the clean tokens before it."""
    assert batch.segments is not None
    total = torch.zeros((), dtype=torch.float64)
    for row, document in ((0, 0), (0, 1), (1, 0)):
        columns = (batch.segments[row] == document).nonzero()[:, 0]
        for start in range(0, len(columns), model.block):
            own = columns[start : start + model.block]
            u = float(batch.noise[row, own[0], 0])
            p = model.schedule.low + (model.schedule.high - model.schedule.low) * u
            hidden = (batch.noise[row, own, 1] < p) & (batch.targets[row, own] != IGNORE_INDEX)
            noised = batch.tokens[row, own].masked_fill(hidden, model.mask_token)
            before = batch.tokens[row, columns[:start]]
            logits = model.token_logits(model(torch.cat([before, noised])[None]).logits[0, start:])
            nats = -logits.log_softmax(-1).gather(1, batch.tokens[row, own][:, None])[:, 0]
            total = total + (nats[hidden] / p).sum().double()
    return total


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("block", [1, 3, 4, 20])
def test_one_pass_is_a_pass_for_each_block(block: int, dtype: torch.dtype, digits: float) -> None:
    model = model_of(block).to(dtype)
    batch = packed_batch()
    loss = model.loss(batch).total
    expected = loss_block_by_block(model, batch)
    assert_close(loss.double(), expected, rtol=digits, atol=0)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        scale = float(wanted.abs().max())
        assert float((gradient - wanted).abs().max()) <= 10 * digits * max(scale, 1e-3)


def test_blocks_of_one_are_a_causal_model_and_one_block_is_a_masked_diffusion() -> None:
    batch = packed_batch()
    causal = model_of(1, lowest_rate=1.0).double()
    assert batch.segments is not None
    hidden = torch.where(batch.targets == IGNORE_INDEX, batch.tokens, causal.mask_token)
    # at the highest rate every target is hidden: the negative log-likelihood, without any chance
    assert bool((causal.predict_hidden(batch, by_counts=False).hidden.is_hidden == (hidden != batch.tokens)).all())
    assert_close(causal.loss(batch).total.detach(), causal.eval().score(batch).nll, rtol=1e-12, atol=0)
    whole = model_of(20).double()
    masked = build("mdlm", vocab=VOCAB, dim=16, depth=2, heads=2, dropout=0.0).double()
    masked.load_state_dict(whole.state_dict())
    assert_close(whole.eval().score(batch).nll, masked.eval().score(batch).nll, rtol=1e-12, atol=0)


@pytest.mark.parametrize("sampler", ["ancestral", "first-hitting", "low-confidence"])
def test_a_cache_of_finished_blocks_changes_no_token(sampler: str) -> None:
    model = model_of(4).double()
    prompts = [[1, 7, 9], [1, 6, 7, 8, 9, 10, 11, 12, 13], [1]]
    cached = denoise(model, prompts, max_new=11, sampler=sampler, seed=5)
    plain = denoise(model, prompts, max_new=11, sampler=sampler, seed=5, use_cache=False)
    assert cached.tokens == plain.tokens
    assert [len(tokens) for tokens in cached.tokens] == [14, 20, 12]
    assert cached.calls > 0
    assert all(tokens[: len(prompt)] == prompt for prompt, tokens in zip(prompts, cached.tokens))


def test_a_state_holds_finished_blocks() -> None:
    model = model_of(4).double()
    tokens = torch.randint(5, VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))
    whole = model(tokens).logits
    state = model.init_state(2)
    first = model(tokens[:, :4], None, state)
    second = model(tokens[:, 4:8], None, first.state)
    # a block is computed again while it changes: a state is not changed by the call that is given it
    again = model(tokens[:, 4:8].flip(1), None, first.state)
    last = model(tokens[:, 8:], None, second.state)
    assert_close(torch.cat([first.logits, second.logits, last.logits], dim=1), whole, rtol=1e-12, atol=1e-12)
    assert float((again.logits - second.logits).abs().max()) > 1e-3


def test_other_masks_and_rates_without_a_range_are_refused() -> None:
    body = Chain(attention=Attention(8, 2, SoftmaxKernel()))
    parts = (TokenEmbedding(9, 8), body, ClassHead(8, 9))
    with pytest.raises(UserError, match=r"AllKeys\(\), and a diffusion by blocks of 2 needs BlockCausal\(2\)"):
        BlockDiffusionLM(*parts, LLADA_SCHEDULE, mask_token=4, block=2)
    with pytest.raises(UserError, match=r"lowest_rate \(0.5\) must be at most highest_rate \(0.25\)"):
        build("bd3-lm", vocab=9, dim=8, depth=1, heads=1, lowest_rate=0.5, highest_rate=0.25)


def test_a_gap_before_a_later_block_is_refused() -> None:
    model: Model = model_of(4)
    with pytest.raises(UserError, match="prompt 0 has a gap before a later block of 4 tokens"):
        denoise(model, [[1, 4, 6, 7, 8, 9]])
    with pytest.raises(UserError, match="block is 8, but the model has blocks of 4"):
        denoise(model, [[1]], block=8)
