"""CTC beside the decoder of a Speech-Transformer: what is added to the loss, and the joint ranking of a beam."""

from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.generate import SourceBatch, answer_sources, decoding_from_options
from manyformer.nn.batches import IGNORE_INDEX, TranscriptionBatch
from manyformer.nn.core import PADDING_SEGMENT

SIZES: dict[str, Any] = {"vocab": 9, "mels": 8, "dim": 12, "depth": 1, "decoder_depth": 1, "heads": 2, "ff_dim": 16}


def model_with(weight: float) -> Any:
    torch.manual_seed(3)
    return mf.build("speech-transformer", **SIZES, channels=3, dropout=0.0, ctc_weight=weight).double().eval()


def recordings() -> TranscriptionBatch:
    """Two recordings of 40 and 21 frames that say 5 6 6 and 8."""
    torch.manual_seed(5)
    features, segments = torch.randn(2, 40, 8, dtype=torch.float64), torch.zeros(2, 40, dtype=torch.long)
    segments[1, 21:] = PADDING_SEGMENT
    target = torch.tensor([[1, 5, 6, 6], [1, 8, 0, 0]])
    targets = torch.tensor([[5, 6, 6, 2], [8, 2, IGNORE_INDEX, IGNORE_INDEX]])
    return TranscriptionBatch(features, target, targets, segments)


def test_the_weighted_loss_of_each_recording_is_added() -> None:
    model, batch = model_with(0.25), recordings()
    memory = model.encode(batch.features, batch.segments)
    labels, lengths = [[5, 6, 6], [8]], [10, 6]
    total = torch.zeros((), dtype=torch.float64)
    for row, (text, length) in enumerate(zip(labels, lengths)):
        log_probs = model.ctc.head(memory.y[row : row + 1, :length]).log_softmax(-1).transpose(0, 1)
        sizes = torch.tensor([length]), torch.tensor([len(text)])
        total = total + torch.nn.functional.ctc_loss(log_probs, torch.tensor([text]), *sizes, reduction="sum")
    loss = model.loss(batch)
    torch.testing.assert_close(loss.extra, 0.25 / 0.75 * total / 6)
    alone = model.encode(batch.features[1:, :21])
    log_probability = model.ctc.log_probability(alone, [8])
    assert log_probability == pytest.approx(
        -total.item() - model.ctc.log_probability(model.encode(batch.features[:1]), [5, 6, 6])
    )
    assert model.ctc.log_probability(alone, [8] * 6) == float("-inf")
    # no alignment has the blank as a label
    assert model.ctc.log_probability(alone, [8, 0]) == float("-inf")


def test_the_beam_is_ranked_by_both() -> None:
    model, batch = model_with(0.5), recordings()
    sources, decoding = SourceBatch(batch.features, batch.segments), decoding_from_options(beam=4, best=4, max_new=6)
    joint = answer_sources(model, sources, decoding=decoding).rows
    ctc, model.ctc = model.ctc, None
    plain = answer_sources(model, sources, decoding=decoding).rows
    for row, (ranked, hypotheses) in enumerate(zip(joint, plain)):
        memory = model.encode(batch.features[row : row + 1], batch.segments[row : row + 1])
        scores = {
            tuple(item.tokens): 0.5 * ctc.log_probability(memory, item.tokens) + 0.5 * item.score for item in hypotheses
        }
        assert [tuple(item.tokens) for item in ranked] == sorted(scores, key=lambda tokens: -scores[tokens])
        assert [item.score for item in ranked] == pytest.approx(sorted(scores.values(), reverse=True))


def test_a_weight_of_one_has_no_decoder() -> None:
    assert model_with(0.0).ctc is None
    with pytest.raises(UserError, match=r"ctc_weight: must be a number >= 0 and < 1, got 1\.0"):
        model_with(1.0)
