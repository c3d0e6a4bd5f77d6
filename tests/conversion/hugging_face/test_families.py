"""Models of `transformers` and their imports compute the same, with padding and from a cache, and so do exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_foreign_models import CASES, LENGTH, VOCAB, saved
from tiny_models import exported

import manyformer as mf
from manyformer.conversion.hugging_face import import_model

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4


def their_logits(model: Any, tokens: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
    mask = None if segments is None else (segments >= 0).long()
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, attention_mask=mask, position_ids=positions).logits
    return logits


def assert_same(theirs: Any, model: Any) -> None:
    """The same logits of whole texts, and of pieces from the state."""
    tokens = torch.randint(0, VOCAB, (3, LENGTH))
    expected = their_logits(theirs, tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected, atol=TOLERANCE, rtol=0)
        state, pieces = model.init_state(3), []
        for piece in torch.split(tokens, [9, 1, 1, 5, 8], dim=1):
            logits, state, _ = model(piece, state=state)
            pieces.append(logits)
        torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_after_import_and_export(case: str, tmp_path: Path) -> None:
    reference = saved(case, tmp_path / "theirs")
    model, report = import_model(tmp_path / "theirs")
    assert report.parameters == sum(weight.numel() for weight in reference.parameters())
    assert_same(reference, model)
    assert type(exported(model, tmp_path / "ours", assert_same)) is type(reference)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "case",
    ["gpt2", "mistral", "qwen3", "smollm3", "gemma2", "mixtral", "deepseek", "gpt-oss", "diffllama", "qwen3-next"],
)
def test_padding(case: str, side: str, tmp_path: Path) -> None:
    reference = saved(case, tmp_path)
    tokens, lengths = torch.randint(0, VOCAB, (3, LENGTH)), torch.tensor([LENGTH, 7, 15])
    columns = torch.arange(LENGTH)
    is_token = columns >= LENGTH - lengths[:, None] if side == "left" else columns < lengths[:, None]
    segments = is_token.long() - 1
    with torch.no_grad():
        logits = import_model(tmp_path).model(tokens, segments).logits
    expected = their_logits(reference, tokens, segments)
    torch.testing.assert_close(logits[is_token], expected[is_token], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", ["gpt2", "mistral", "gemma2", "deepseek", "gpt-oss", "qwen3-next"])
def test_the_same_greedy_and_beam_texts(case: str, tmp_path: Path) -> None:
    reference = saved(case, tmp_path)
    prompt = torch.randint(3, VOCAB, (1, 6))
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(prompt),
    }
    model = mf.load(tmp_path)
    for beams in (1, 3):
        expected = reference.generate(prompt, num_beams=beams, **options)[0, 6:].tolist()
        assert mf.generate(model, prompt[0], beam=beams, max_new=12, stop_ids=()).tokens == [expected]


def test_shards_and_narrow_numbers(tmp_path: Path) -> None:
    full = saved("llama", tmp_path / "whole")
    full.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    own, sharded = (import_model(tmp_path / name).model.state_dict() for name in ("whole", "shards"))
    for name, weight in own.items():
        torch.testing.assert_close(sharded[name], weight, rtol=0, atol=0)
    full.bfloat16().save_pretrained(tmp_path / "narrow")
    narrow = import_model(tmp_path / "narrow").model.state_dict()
    assert all(torch.equal(narrow[name], weight.bfloat16().float()) for name, weight in own.items())


def test_a_model_without_its_head_lacks_the_prefix_alone(tmp_path: Path) -> None:
    reference = saved("gpt2", tmp_path / "whole")
    reference.transformer.save_pretrained(tmp_path / "bare")
    own, bare = (import_model(tmp_path / name).model.state_dict() for name in ("whole", "bare"))
    for name, weight in own.items():
        torch.testing.assert_close(bare[name], weight, rtol=0, atol=0)
