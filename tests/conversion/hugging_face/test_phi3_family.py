"""Phi-3 of `transformers` and its import, below and beyond the length before LongRoPE, and its cache there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import export_model, import_model
from manyformer.conversion.surgery import convert
from manyformer.models import LanguageModel
from transformers_cache import cached_pass

pytestmark = pytest.mark.oracle

VOCAB, ORIGINAL, LONG, TOLERANCE = 60, 16, 40, 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": ORIGINAL,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.9],
    "long_factor": [1.5, 2.25, 6.0, 12.5],
    "original_max_position_embeddings": ORIGINAL,
}
PARTLY_ROTATED = {
    **LONGROPE,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2],
    "long_factor": [3.0, 9.0],
}
CASES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": LONGROPE},
    "longrope-part": {"rope_parameters": PARTLY_ROTATED, "sliding_window": 9, "tie_word_embeddings": True},
}


def in_pieces(model: Any, tokens: Tensor, sizes: list[int]) -> Tensor:
    state, pieces = model.init_state(len(tokens)), []
    for piece in torch.split(tokens, sizes, dim=1):
        logits, state, _ = model(piece, state=state)
        pieces.append(logits)
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_below_and_beyond_the_original_length(case: str, tmp_path: Path) -> None:
    import transformers

    reference = save_tiny(tmp_path / "theirs", "Phi3ForCausalLM", {**SIZES, **CASES[case]})
    model, report = import_model(tmp_path / "theirs")
    assert report.parameters == sum(weight.numel() for weight in reference.parameters())
    tokens = torch.randint(0, VOCAB, (2, LONG))
    short = tokens[:, :ORIGINAL]
    with torch.no_grad():
        expected, expected_short = reference(tokens).logits, reference(short).logits
        torch.testing.assert_close(model(short).logits, expected_short, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(in_pieces(model, short, [7, 1, 8]), expected_short, atol=TOLERANCE, rtol=0)
        with pytest.raises(ValueError, match="17 tokens are more than this model allows"):
            model(tokens[:, : ORIGINAL + 1])
        state = model(short, state=model.init_state(2)).state
        with pytest.raises(ValueError, match="17 tokens are more than this model allows"):
            model(tokens[:, ORIGINAL : ORIGINAL + 1], state=state)
    extended = convert(model, rope_length="extended").model.eval()
    with torch.no_grad():
        torch.testing.assert_close(extended(tokens).logits, expected, atol=TOLERANCE, rtol=0)
        # a cache that crosses the original length is that of a whole pass
        torch.testing.assert_close(in_pieces(extended, tokens, [9, 1, 6, 1, 23]), expected, atol=TOLERANCE, rtol=0)
    assert isinstance(extended, LanguageModel)
    for exported in (model, extended):
        export_model(exported, tmp_path / "ours")
        back, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert type(back) is type(reference)
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        with torch.no_grad():
            torch.testing.assert_close(back(tokens).logits, expected, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(back(short).logits, expected_short, atol=TOLERANCE, rtol=0)


def test_their_cache_is_stale_beyond_the_original_length(tmp_path: Path) -> None:
    """Keys that were cached for a short text keep the rotation of its divisors: the reason for two models here."""
    reference = save_tiny(tmp_path, "Phi3ForCausalLM", {**SIZES, **CASES["longrope"]})
    tokens = torch.randint(0, VOCAB, (1, ORIGINAL + 4))
    with torch.no_grad():
        _, cache = cached_pass(reference, None, input_ids=tokens[:, :ORIGINAL])
        stepped, _ = cached_pass(reference, cache, input_ids=tokens[:, ORIGINAL:])
        full = reference(tokens).logits[:, ORIGINAL:]
    assert (stepped - full).abs().max() > 100 * TOLERANCE


def test_older_files_and_plain_ones(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Phi3ForCausalLM", {**SIZES, **CASES["longrope"]})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    old = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    file.write_text(json.dumps({**config, "rope_theta": 1e4, "rope_scaling": old}))
    keywords = import_model(tmp_path).model.spec.keywords
    assert keywords["rope_divisors"] == "1.0,1.1,1.3,1.9/1.5,2.25,6.0,12.5"
    assert (keywords["rope_factor"], keywords["original_length"]) == (4.0, ORIGINAL)
    file.write_text(json.dumps({**config, "rope_theta": 1e4, "rope_scaling": None}))
    plain = import_model(tmp_path).model
    assert plain.spec.keywords["rope_scaling"] == "none"
    export_model(plain, tmp_path / "ours", model_type="phi3")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "phi3"


@pytest.mark.parametrize("value", [[1.0, 2.0], [1.0, 0.0, 2.0, 3.0], "1,2,3,4", [1.0, "a", 2.0, 3.0]])
def test_divisors_that_cannot_be_are_refused(value: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path, "Phi3ForCausalLM", {**SIZES, **CASES["longrope"]})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["long_factor"] = value
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config.json: long_factor .* must be a list of 4 numbers above 0"):
        import_model(tmp_path)


def test_keywords_that_exclude_each_other() -> None:
    sizes = {"vocab": 9, "dim": 16, "depth": 1, "heads": 2}
    with pytest.raises(UserError, match="rope_scaling=longrope needs rope_divisors, numbers with commas"):
        mf.build("llama", **sizes, rope_scaling="longrope")
    with pytest.raises(UserError, match=r"needs rope_divisors, numbers with commas.* not '1,x'"):
        mf.build("llama", **sizes, rope_scaling="longrope", rope_divisors="1,x")
    with pytest.raises(ValueError, match="3 divisors, but 4 pairs"):
        mf.build("llama", **sizes, rope_scaling="longrope", rope_divisors="1,2,3")
    with pytest.raises(UserError, match="are those of rope_scaling=longrope, and it is none"):
        mf.build("llama", **sizes, rope_length="extended")
    model = mf.build("llama", **sizes, rope_scaling="longrope", rope_divisors="1,2,3,4")
    with pytest.raises(UserError, match="rope_scaling is longrope, which a LlamaForCausalLM"):
        export_model(model, "nowhere", model_type="llama")
