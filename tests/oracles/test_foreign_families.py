"""Hugging Face families with positions, lengths or computations of their own are checked as they are."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.analysis.contracts import CheckReport
from transformers_cache import cached_pass

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install 'manyformer[hf]')"
)
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import foreign_models  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
SMALL_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


def check_family(name: str, config: Any) -> CheckReport:
    torch.manual_seed(0)
    return mf.check(getattr(transformers, name)(config), skip=["compile", "saving"], length=24)


def verdicts(report: CheckReport) -> dict[str, str]:
    return {row.contract: row.verdict for row in report.rows}


def test_the_smaller_of_two_lengths_is_the_limit() -> None:
    config = transformers.LEDConfig(
        **SMALL_SEQ2SEQ, max_encoder_position_embeddings=512, max_decoder_position_embeddings=40, attention_window=8
    )
    model = transformers.LEDForConditionalGeneration(config)
    report = mf.check(model, only=["causal", "causal-training", "cached", "source-padding"])
    assert set(verdicts(report).values()) == {"passed"}, report.table()
    assert report.length == 40


def test_what_a_foreign_model_cannot_compute_in_float64_is_not_run() -> None:
    config = transformers.XGLMConfig(
        vocab_size=60, d_model=32, num_layers=1, attention_heads=2, ffn_dim=48, max_position_embeddings=64
    )
    report = check_family("XGLMForCausalLM", config)
    assert report.ok, report.table()
    assert report["float64"].verdict == "not run"
    assert report["float64"].sentence.startswith("not run: the model raised ")


def test_experts_chosen_by_content_are_no_leak() -> None:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, max_position_embeddings=64)
    report = check_family("MixtralForCausalLM", config)
    assert report.ok, report.table()
    assert report["batch-training"].verdict == "passed"


def test_positions_that_begin_after_those_of_padding_are_counted_from_there() -> None:
    config = transformers.RobertaConfig(**SMALL, max_position_embeddings=50, is_decoder=True, pad_token_id=1)
    report = check_family("RobertaForCausalLM", config)
    assert report.ok, report.table()
    assert report["padding-left"].verdict == report["padding-state"].verdict == "passed"
    longest = mf.check(transformers.RobertaForCausalLM(config), only=["causal"])
    assert (longest.ok, longest.length) == (True, 48)


def test_a_masked_language_model_is_checked_but_for_causality() -> None:
    report = check_family("BertForMaskedLM", transformers.BertConfig(**SMALL))
    assert report.ok, report.table()
    assert report["causal"].sentence == "not promised: it does not generate, and attends to both sides"
    assert report["padding-left"].verdict == report["batch-training"].verdict == "passed"


def test_a_model_without_logits_of_tokens_is_not_run() -> None:
    report = check_family("BertModel", transformers.BertConfig(**SMALL))
    assert "passed" not in verdicts(report).values()
    assert report["batch"].sentence == "not run: its forward gives no logits for each token"


def test_decoders_that_count_columns_do_not_promise_padding_before_the_tokens() -> None:
    config = transformers.BartConfig(**SMALL_SEQ2SEQ, max_position_embeddings=64, is_decoder=True)
    report = check_family("BartForCausalLM", config)
    assert report["padding-left"].sentence == "not promised: it numbers positions by column and takes no position ids"
    assert report["padding-right"].verdict == report["cached"].verdict == "passed"


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_state_space_models_keep_what_they_promise(name: str) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8}
    heads = {"num_heads": 8, "head_dim": 8, "chunk_size": 8} if name == "Mamba2" else {}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads)
    report = check_family(f"{name}ForCausalLM", config)
    for contract in ("causal", "causal-training", "cached", "beams"):
        assert report[contract].verdict == "passed", report.table()
    # Mamba's scan of several tokens begins with a state of zeros, also behind a cache
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    tokens = torch.randint(3, 60, (1, 12))
    with torch.no_grad():
        _, cache = cached_pass(model, None, input_ids=tokens[:, :6])
        continued, _ = cached_pass(model, cache, input_ids=tokens[:, 6:])
        difference = (continued - model(tokens).logits[:, 6:]).abs().max()
    assert (report["prefill"].verdict == "failed") == (difference > 1e-4)
    assert {row.contract for row in report.failed} <= {"prefill", "padding-state"}, report.table()


@pytest.mark.parametrize("causal", [False, True])
def test_a_family_whose_configuration_says_whether_it_is_causal(causal: bool) -> None:
    config = transformers.XLMConfig(
        vocab_size=60, emb_dim=32, n_layers=1, n_heads=2, max_position_embeddings=64, causal=causal
    )
    report = check_family("XLMWithLMHeadModel", config)
    assert report["causal"].verdict == ("passed" if causal else "not promised")


def test_a_length_of_minus_one_is_no_limit() -> None:
    config = transformers.XLNetConfig(vocab_size=60, d_model=32, n_layer=1, n_head=2, d_inner=48)
    report = check_family("XLNetLMHeadModel", config)
    assert report["batch"].verdict == "passed"
    assert report["causal"].sentence.startswith("not promised: its configuration has attn_type='bi'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family"), [(kind, family) for kind, families in foreign_models.KINDS.items() for family in families]
)
def test_every_family_is_checked_or_says_why_not(kind: str, family: str) -> None:
    row = foreign_models.check_family(kind, family, 48)
    assert row.passed or row.reasons
    assert len(row.passed) + len(row.failed) + len(row.not_run) > 0 or row.reasons[0].startswith("cannot be ")
