"""T5 of `transformers`, with random weights, is our recipe: same outputs, same gradients, also decoded from a cache."""

from typing import Any

import pytest
import torch
from mapping import by_family, gradients_of, weights_of
from pairs import DEPTH, DIM, END, HEADS, HIDDEN, VOCAB, shaken
from torch import Tensor

import manyformer as mf
from manyformer.nn.batches import Seq2SeqBatch
from manyformer.nn.core import PADDING_SEGMENT
from transformers_cache import cached_pass

pytestmark = pytest.mark.oracle

HEAD_DIM, BUCKETS, MAX_DISTANCE = 6, 8, 20


def pair_of(activation: str, output: str) -> tuple[Any, Any]:
    """`t5` and T5, in float64: unscaled scores saturate, so that float32 loses digits in both."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(6)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=DIM,
        d_kv=HEAD_DIM,
        d_ff=HIDDEN,
        num_layers=DEPTH,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=MAX_DISTANCE,
        dropout_rate=0.0,
        feed_forward_proj=activation,
        tie_word_embeddings=output == "tied",
        pad_token_id=0,
        eos_token_id=END,
        decoder_start_token_id=0,
    )
    reference = shaken(T5ForConditionalGeneration(config)).double()
    for module in list(reference.modules()):
        for name, part in list(module.named_children()):
            if type(part).__name__ == "T5LayerNorm":
                # theirs takes the mean square in float32, whatever the dtype
                norm = torch.nn.RMSNorm(DIM, eps=part.variance_epsilon, dtype=torch.float64)
                norm.weight = part.weight
                setattr(module, name, norm)
    if output == "untied":
        # the file says untied, which 5.23 replaces by tied weights and no scale
        reference.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, DIM, dtype=torch.float64))
    sizes = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "heads": HEADS, "ff_dim": HIDDEN, "head_dim": HEAD_DIM}
    options = {"activation": activation, "output": output, "buckets": BUCKETS, "max_distance": MAX_DISTANCE}
    ours = mf.build("t5", **sizes, **options, dropout=0.0).double().eval()
    ours.load_state_dict(by_family("t5", ours, weights_of(reference)))
    return ours, reference


@pytest.fixture(scope="module", params=[("relu", "tied"), ("gated-gelu", "untied")], ids=str)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return pair_of(*request.param)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Sources with padding on the right, their segments, and targets; distances are beyond the last bucket."""
    segments = torch.where(torch.arange(33) < torch.tensor([33, 9, 21])[:, None], 0, PADDING_SEGMENT)
    return torch.randint(3, VOCAB, (3, 33)), segments, torch.randint(3, VOCAB, (3, 27))


def test_logits(models: tuple[Any, Any]) -> None:
    ours, reference = models
    source, segments, target = inputs()
    with torch.no_grad():
        expected = reference(source, attention_mask=segments + 1, decoder_input_ids=target).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(ours(source, target, segments).logits, expected, atol=1e-5, rtol=0)


def test_cached_decoding(models: tuple[Any, Any]) -> None:
    ours, reference = models
    source, segments, target = inputs()
    with torch.no_grad():
        memory, state, past = ours.encode(source, segments), ours.init_state(3), None
        encoded = reference.encoder(source, attention_mask=segments + 1)
        for part in target.split([6, 1, 1, 16, 3], dim=1):
            mine = ours.decode(part, memory, None, state)
            expected, past = cached_pass(
                reference, past, encoder_outputs=encoded, attention_mask=segments + 1, decoder_input_ids=part
            )
            state = mine.state
            torch.testing.assert_close(mine.logits, expected, atol=1e-5, rtol=0)


def test_gradients(models: tuple[Any, Any]) -> None:
    ours, reference = models
    source, segments, target = inputs()
    targets = torch.randint(3, VOCAB, target.shape)
    loss = ours.loss(Seq2SeqBatch(source, target, targets, segments))
    loss.total.div(loss.targets).backward()
    reference(source, attention_mask=segments + 1, decoder_input_ids=target, labels=targets).loss.backward()
    expected = by_family("t5", ours, gradients_of(reference))
    # the table of a side is stored once, and the embedding divided by sqrt(dim): its gradient is multiplied by it
    expected["embed_source.token.weight"] = expected["embed_source.token.weight"] * DIM
    for name, value in ours.named_parameters():
        assert value.grad is not None, name
        torch.testing.assert_close(value.grad, expected[name], atol=1e-8, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
