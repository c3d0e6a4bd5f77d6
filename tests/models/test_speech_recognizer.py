"""The recognizer's loss and scores row by row, its transcripts, and sound that arrives in pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models import SpeechRecognizer
from manyformer.nn.batches import IGNORE_INDEX, TranscriptionBatch
from manyformer.nn.core import PADDING_SEGMENT, state_bytes

MELS, VOCAB = 8, 11
SIZES: dict[str, Any] = {
    "vocab": VOCAB,
    "mels": MELS,
    "dim": 12,
    "depth": 2,
    "heads": 2,
    "ff_dim": 16,
    "channels": 3,
    "kernel_size": 3,
    "dropout": 0.0,
}


def recognizer(name: str = "conformer", **keywords: Any) -> SpeechRecognizer:
    torch.manual_seed(6)
    model = mf.build(name, **SIZES | keywords).double().eval()
    assert isinstance(model, SpeechRecognizer)
    return model


def recordings() -> TranscriptionBatch:
    """Two recordings of 30 and 17 frames, and their labels 5 6 6 7 and 8 9."""
    features, segments = torch.randn(2, 30, MELS, dtype=torch.float64), torch.zeros(2, 30, dtype=torch.long)
    segments[1, 17:] = PADDING_SEGMENT
    target = torch.tensor([[1, 5, 6, 6, 7], [1, 8, 9, 0, 0]])
    ignored = IGNORE_INDEX
    targets = torch.tensor([[5, 6, 6, 7, 2], [8, 9, 2, ignored, ignored]])
    return TranscriptionBatch(features, target, targets, segments)


def loss_of_row(model: SpeechRecognizer, features: Tensor, labels: list[int]) -> Tensor:
    log_probs = model(features[None]).logits.log_softmax(-1).transpose(0, 1)
    length, count = torch.tensor([len(log_probs)]), torch.tensor([len(labels)])
    return torch.nn.functional.ctc_loss(log_probs, torch.tensor([labels]), length, count, reduction="sum")


def test_the_loss_is_that_of_each_recording() -> None:
    model, batch = recognizer(), recordings()
    expected = loss_of_row(model, batch.features[0], [5, 6, 6, 7]) + loss_of_row(model, batch.features[1, :17], [8, 9])
    loss = model.loss(batch)
    torch.testing.assert_close(loss.total, expected, check_dtype=False)
    assert int(loss.targets) == batch.target_count() == 8
    assert model.loss(batch.ignored()).total.item() == 0
    with pytest.raises(UserError, match=r"label_smoothing \(0.1\)"):
        model.loss(batch, label_smoothing=0.1)


def test_a_text_that_is_too_long_is_named() -> None:
    batch = recordings()
    short = torch.zeros_like(batch.segments)
    short[1, 4:] = PADDING_SEGMENT
    with pytest.raises(UserError, match="row 1 of the batch has 2 labels, but only 1 positions"):
        recognizer().loss(batch._replace(segments=short))


def test_scores_count_the_edits_of_the_best_alignment() -> None:
    model, batch = recognizer(), recordings()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()[5] = 9.0
        score = model.score(batch)
    # the model writes 5 for all: one label of the first text is right, none of the second
    assert {name: int(value) for name, value in score.others.items()} == {"label_edits": 3 + 2, "labels": 6}
    assert int(score.correct) == (5 - 3) + (3 - 2)
    assert [item.labels for item in model.transcribe(batch.features, batch.segments)] == [(5,), (5,)]


def test_transcripts_do_not_depend_on_padding() -> None:
    model, batch = recognizer(), recordings()
    for beam in (1, 4):
        both = model.transcribe(batch.features, batch.segments, beam=beam)
        alone = model.transcribe(batch.features[1:, :17], beam=beam)
        assert both[1].labels == alone[0].labels
        assert both[1].log_probability == pytest.approx(alone[0].log_probability)


def test_sound_in_pieces_gives_the_same_with_a_state_of_constant_size() -> None:
    model, features = recognizer("streaming-conformer", window=4), torch.randn(2, 120, MELS, dtype=torch.float64)
    full = model(features).logits
    state, pieces, sizes = model.init_state(2), list[Tensor](), list[int]()
    with torch.no_grad():
        for piece in features.split([16, 4, 20, 40, 4, 4, 28, 4], dim=1):
            logits, state, _ = model(piece, None, state)
            pieces.append(logits)
            sizes.append(state_bytes(state))
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-9, rtol=0)
    assert len(set(sizes)) == 1
    assert sizes[0] == state_bytes(model.init_state(2))
    with pytest.raises(UserError, match="a piece of 3 frames cannot be continued: 4 frames are a token"):
        model(features[:, :3], None, state)


def test_what_is_out_of_reach_is_forgotten() -> None:
    """Two layers, each with 4 tokens of attention and 3 of convolution, reach back (3 + 2) x 2 tokens."""
    model, features = recognizer("streaming-conformer", window=4), torch.randn(1, 80, MELS, dtype=torch.float64)
    changed = features.clone()
    changed[:, :4] += 1.0
    difference = (model(features).logits - model(changed).logits).abs().amax(-1)[0]
    assert difference[:10].min() > 0
    # the convolutions that join frames see the frames of the token before
    assert difference[12:].max() == 0
