"""Encoder-decoders whose source is an image: the same model, decoding and beams as for token ids."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.inference.generate import (
    Decoding,
    SourceBatch,
    SourceLengthLimit,
    answer_sources,
    decoding_from_options,
)
from manyformer.models import ClassHead, EncoderDecoder, PatchEmbedding, TokenEmbedding
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.batches import Seq2SeqBatch
from manyformer.nn.core import Context, TokenPositions
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.positions import LearnedPosition
from manyformer.recipes.parts.baselines import stack

DIM, VOCAB, LIMIT = 16, 11, 6
BOS, EOS = 1, 2


@pytest.fixture
def model() -> EncoderDecoder:
    """Nine patches, more than the six tokens that a target may have."""
    torch.manual_seed(0)
    source = PatchEmbedding((6, 6, 1), 2, DIM, position=LearnedPosition(DIM, 9, std=1.0))
    target = TokenEmbedding(VOCAB, DIM, position=LearnedPosition(DIM, LIMIT, std=1.0), std=1.0)

    def attention(mask: Causal | None = None) -> Attention:
        return Attention(DIM, 2, SoftmaxKernel(mask))

    def cross() -> Attention:
        return Attention(DIM, 2, SoftmaxKernel(), source=CrossAttentionSource())

    options = {"order": "pre", "norm": lambda: nn.LayerNorm(DIM), "dropout": 0.0}
    encoder = stack(1, lambda _: {"attention": attention(), "ff": FeedForward(DIM)}, **options)
    decoder = stack(
        1, lambda _: {"attention": attention(Causal()), "cross": cross(), "ff": FeedForward(DIM)}, **options
    )
    return EncoderDecoder(source, encoder, target, decoder, ClassHead(DIM, VOCAB)).double().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randint(256, (3, 6, 6, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_only_the_target_is_limited_by_its_positions(model: EncoderDecoder, images: Tensor) -> None:
    assert model.max_length == LIMIT
    assert model.encode(images).y.shape == (3, 9, DIM)
    with pytest.raises(ValueError, match="7 tokens are more than this model allows: it was built with max_length=6"):
        model(images, torch.ones(3, LIMIT + 1, dtype=torch.long))


def test_patches_that_are_padding_are_not_seen(model: EncoderDecoder, images: Tensor) -> None:
    """Equal to attention over the vectors of the other patches alone, which keep their positions."""
    present = torch.arange(9) % 2 == 0
    segments = torch.where(present, 0, -1).expand(3, -1)
    memory = model.encode(images, segments)
    embedded = model.embed_source.read_source(images, None)
    rest = TokenPositions(embedded.positions.position_ids[:, present], segments[:, present])
    alone = model.encoder(embedded.x[:, present], Context(rest)).y
    torch.testing.assert_close(memory.y[:, present], alone, rtol=0, atol=1e-12)
    target = torch.tensor([[BOS, 5, 7]]).expand(3, -1)
    changed = images.clone()
    changed[:, 0:2, 2:4] = 255 - changed[:, 0:2, 2:4]
    torch.testing.assert_close(model(changed, target, segments).logits, model(images, target, segments).logits)


def score(model: EncoderDecoder, image: Tensor, tokens: tuple[int, ...]) -> float:
    target = torch.tensor([[BOS, *tokens[:-1]]])
    log_probs = model(image[None], target).logits.log_softmax(-1)[0]
    return float(log_probs[torch.arange(len(tokens)), torch.tensor(tokens)].sum())


@pytest.mark.slow
@torch.inference_mode()
def test_a_wide_beam_finds_the_best_caption_of_all(model: EncoderDecoder, images: Tensor) -> None:
    words, longest = tuple(range(3, VOCAB)), 3
    endless = itertools.product(words, repeat=longest)
    ended = ((*body, EOS) for length in range(longest) for body in itertools.product(words, repeat=length))
    candidates = [*endless, *ended]
    decoding = Decoding(
        choice=decoding_from_options(beam=100, length_penalty=0.0).choice, max_new=longest, ban=(0, BOS)
    )
    answers = answer_sources(model, SourceBatch(images, None), decoding=decoding, batch=2).rows
    for image, (best,) in zip(images, answers, strict=True):
        scores = {tokens: score(model, image, tokens) for tokens in candidates}
        expected = max(scores, key=scores.__getitem__)
        assert tuple(best.tokens) == (expected[:-1] if expected[-1] == EOS else expected)
        assert best.score == pytest.approx(scores[expected], abs=1e-5)


@torch.inference_mode()
def test_captions_need_no_cache(model: EncoderDecoder, images: Tensor) -> None:
    sources = SourceBatch(images, None)
    cached, full = (answer_sources(model, sources, decoding=Decoding(use_cache=use)) for use in (None, False))
    assert cached.tokens == full.tokens
    assert max(map(len, cached.tokens)) <= LIMIT
    assert cached.stats.prompts == 3


def test_the_limits_of_captions_are_numbers_within_the_model(model: EncoderDecoder, images: Tensor) -> None:
    with pytest.raises(UserError, match="max_new is 7, but the model generates at most 6"):
        answer_sources(model, SourceBatch(images, None), decoding=Decoding(max_new=7))
    with pytest.raises(UserError, match="give max_new as a number"):
        answer_sources(model, SourceBatch(images, None), decoding=Decoding(max_new=SourceLengthLimit()))


@torch.inference_mode()
def test_the_loss_reads_images_from_the_batch(model: EncoderDecoder, images: Tensor) -> None:
    target = torch.tensor([[BOS, 5, 7]] * 3)
    targets = torch.tensor([[5, 7, EOS]] * 3)
    nll = float(model.score(Seq2SeqBatch(images, target, targets)).nll)
    assert nll == pytest.approx(-sum(score(model, image, (5, 7, EOS)) for image in images), rel=1e-6)
