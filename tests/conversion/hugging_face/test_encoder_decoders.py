"""Encoder-decoders of `transformers` and their imports compute the same, padded and from a cache, and so do exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_encoder_decoders import CASES, LENGTH, saved
from tiny_models import exported

import manyformer as mf
from manyformer.conversion.hugging_face import export_model, import_model
from manyformer.inference.generate import AverageLogProbPenalty, BeamSettings, Decoding, GreedyChoice, LikelyStopping
from manyformer.nn.core import PADDING_SEGMENT

pytestmark = pytest.mark.oracle


def inputs(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sources with padding on the right, their segments, and targets."""
    lengths = torch.tensor([LENGTH, 7, 15])
    segments = torch.where(torch.arange(LENGTH) < lengths[:, None], 0, PADDING_SEGMENT)
    vocab = model.get_output_embeddings().weight.shape[0]
    return torch.randint(3, vocab, (3, LENGTH)), segments, torch.randint(3, vocab, (3, 17))


def assert_same(theirs: Any, model: Any) -> None:
    """The same logits of whole targets, and of pieces from the state."""
    source, segments, target = inputs(theirs)
    with torch.no_grad():
        expected = theirs(source, attention_mask=segments + 1, decoder_input_ids=target).logits
        # T5's scores are not scaled, and saturate: both sides then lose digits
        tolerance = {"atol": 1e-4 * max(1.0, float(expected.std())), "rtol": 0}
        torch.testing.assert_close(model(source, target, segments).logits, expected, **tolerance)
        memory, state, pieces = model.encode(source, segments), model.init_state(3), []
        for piece in target.split([6, 1, 1, 9], dim=1):
            logits, state, _ = model.decode(piece, memory, None, state)
            pieces.append(logits)
        torch.testing.assert_close(torch.cat(pieces, 1), expected, **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_after_import_and_export(case: str, tmp_path: Path) -> None:
    reference = saved(case, tmp_path / "theirs")
    model = import_model(tmp_path / "theirs").model
    assert_same(reference, model)
    # sinusoids are computed
    back = exported(model, tmp_path / "ours", assert_same, missing="embed_positions.weight", rtol=1e-6)
    assert case == "mt5" or type(back) is type(reference)


@pytest.mark.parametrize("case", ["bart", "bart-odd", "mbart", "marian", "marian-two", "pegasus", "t5", "t5-unscaled"])
def test_the_same_greedy_and_beam_texts(case: str, tmp_path: Path) -> None:
    reference = saved(case, tmp_path / "theirs")
    if case == "marian":
        reference.generation_config.bad_words_ids = [[49]]
        reference.generation_config.save_pretrained(tmp_path / "theirs")
    if case == "bart-odd":
        # newer versions do not take it from the config of the model
        reference.generation_config.forced_bos_token_id = 23
        reference.generation_config.save_pretrained(tmp_path / "theirs")
    source, segments, _ = inputs(reference)
    rows = [row[row_segments == 0].tolist() for row, row_segments in zip(source, segments, strict=True)]
    imported = mf.load(tmp_path / "theirs")
    imported.save(tmp_path / "saved")
    export_model(imported, tmp_path / "exported")
    for folder in ("theirs", "saved", "exported"):
        model = mf.load(tmp_path / folder)
        assert model.generation == imported.generation
        for beams in (1, 3):
            options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 12}
            texts = reference.generate(source, attention_mask=segments + 1, **options).tolist()
            beam = BeamSettings(beams, AverageLogProbPenalty(1.0), stopping=LikelyStopping())
            choice = beam if beams > 1 else GreedyChoice()
            answers = mf.generate(model, rows, decoding=Decoding(choice=choice, max_new=12)).rows
            assert [answer[0].tokens for answer in answers] == [without_ends(text, reference) for text in texts]


def without_ends(text: list[int], model: Any) -> list[int]:
    """The tokens between the start and the first end of a text."""
    end = model.generation_config.eos_token_id
    tokens = text[1:]
    return tokens[: tokens.index(end)] if end in tokens else tokens
