"""`check` finds defects of released software: models that see the future, and a cache that decodes something else.

Each finding is confirmed by hand, and each has a control that is clean.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.contracts import Adapter, CheckReport
from transformers_cache import cache_name

# the warnings of these libraries, and of torch about what they do, are not ours to mend
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

VOCAB = 60
CAUSAL = ["repeatable", "causal", "causal-gradient"]
WHY = "the released package {} is not installed (pip install 'manyformer[peers]')"


def installed(name: str) -> Any:
    return pytest.importorskip(name, reason=WHY.format(name))


def red(report: CheckReport) -> set[str]:
    return {row.contract for row in report.failed}


@torch.no_grad()
def leak_by_hand(logits: Callable[[Tensor], Tensor], length: int) -> float:
    """How far outputs move when nothing but later tokens changes, the random numbers being the same."""

    def seeded(tokens: Tensor) -> Tensor:
        torch.manual_seed(0)
        return logits(tokens)

    tokens = torch.randint(5, VOCAB, (1, length))
    before = seeded(tokens)
    assert torch.equal(before, seeded(tokens)), "the control: the same call twice"
    worst = 0.0
    for cut in range(length // 4, length, length // 8):
        changed = tokens.clone()
        changed[:, cut:] = torch.randint(5, VOCAB, (1, length - cut))
        worst = max(worst, float((seeded(changed) - before)[:, :cut].abs().max()))
    return worst


def big_bird(attention: str, block: int) -> Any:
    transformers = installed("transformers")
    config = transformers.BigBirdConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=512,
        is_decoder=True,
        attention_type=attention,
        block_size=block,
        num_random_blocks=3 if block == 16 else 1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        sep_token_id=3,
    )
    return transformers.BigBirdForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("block", [16, 64])
def test_big_bird_as_a_decoder_sees_the_future(block: int) -> None:
    report = mf.check(big_bird("block_sparse", block), only=[*CAUSAL, "traceless"])
    assert red(report) == {"causal", "causal-gradient", "traceless"}
    assert report.length == 512
    assert report["causal"].measured is not None
    assert report["causal"].measured > 1e-6
    assert "change outputs from 0 on" in report["causal"].sentence
    fresh = big_bird("block_sparse", block)
    assert leak_by_hand(lambda tokens: fresh(tokens, use_cache=False).logits, 512) > 1e-6


@pytest.mark.slow
def test_big_bird_without_its_sparse_pattern_is_clean() -> None:
    assert mf.check(big_bird("original_full", 64), only=[*CAUSAL, "traceless"]).ok


def test_big_bird_leaks_only_where_its_pattern_is_used() -> None:
    # below 176 tokens it quietly turns to dense attention, which is why a check of short rows proves nothing
    assert mf.check(big_bird("block_sparse", 16), only=CAUSAL, length=128).ok


def test_gpt2_is_clean_as_it_is() -> None:
    transformers = installed("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=512, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    report = mf.check(model, skip=["compile"], length=64)
    assert report.ok, report.table()
    passed = {row.contract for row in report.rows if row.verdict == "passed"}
    assert passed >= {"causal", "causal-gradient", "cached", "prefill", "beams", "padding-left", "padding-right"}
    assert passed >= {"padding-state", "batch", "empty-rows", "gradients", "float64", "bfloat16", "saving"}
    assert leak_by_hand(lambda tokens: model.eval()(tokens).logits, 512) == 0


def test_a_hugging_face_cache_that_loses_a_token_is_found() -> None:
    transformers = installed("transformers")

    class Forgetful(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            cache = out.get(cache_name(transformers.GPT2LMHeadModel))
            if cache is not None and cache.get_seq_length() == 10:
                for layer in cache.layers:
                    layer.values[:, :, 4] = 0
            return out

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    report = mf.check(Forgetful(config), only=["causal", "cached"])
    assert red(report) == {"cached"}
    assert "token 10" in report["cached"].sentence


def test_marian_and_t5_are_clean_as_they_are() -> None:
    transformers = installed("transformers")
    marian = transformers.MarianConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        pad_token_id=VOCAB - 1,
        eos_token_id=0,
        forced_eos_token_id=None,
        decoder_start_token_id=VOCAB - 1,
    )
    t5 = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=16, num_layers=1, num_heads=2, d_ff=64, decoder_start_token_id=0
    )
    for model in (transformers.MarianMTModel(marian), transformers.T5ForConditionalGeneration(t5)):
        report = mf.check(model, skip=["compile"], length=64)
        assert report.ok, report.table()
        assert report["source-padding"].verdict == report["beams"].verdict == "passed"


@pytest.mark.slow
def test_reformer_pytorch_sees_the_future() -> None:
    reformer = installed("reformer_pytorch")
    net = reformer.ReformerLM(
        num_tokens=VOCAB, dim=32, depth=2, heads=2, max_seq_len=128, bucket_size=16, n_hashes=2, causal=True
    )
    report = mf.check(Adapter(logits=net, vocab=VOCAB, max_length=128, length_multiple=32), only=[*CAUSAL, "gradients"])
    # what later tokens change is which tokens share a chunk; that choice has no gradient
    assert red(report) == {"causal"}
    assert report["causal"].measured is not None
    assert report["causal"].measured > 1e-3
    assert leak_by_hand(net.eval(), 128) > 1e-3


def test_routing_transformer_sees_the_future() -> None:
    routing = installed("routing_transformer")
    net = routing.RoutingTransformerLM(
        num_tokens=VOCAB, dim=32, depth=2, heads=2, max_seq_len=128, window_size=32, n_local_attn_heads=1, causal=True
    )

    def logits(tokens: Tensor) -> Tensor:
        actual: Tensor = net(tokens)[0]
        return actual

    adapter = Adapter(logits=logits, vocab=VOCAB, max_length=128, length_multiple=32, module=net)
    report = mf.check(adapter, only=CAUSAL)
    assert red(report) == {"causal"}
    assert report["causal"].measured is not None
    assert report["causal"].measured > 1e-2
    net.eval()
    assert leak_by_hand(logits, 128) > 1e-2


@pytest.mark.slow
def test_performer_pytorch_sees_the_future() -> None:
    performer = installed("performer_pytorch")
    net = performer.PerformerLM(num_tokens=VOCAB, dim=32, depth=1, heads=2, max_seq_len=64, causal=True)
    report = mf.check(Adapter(logits=net, vocab=VOCAB, max_length=64), only=CAUSAL)
    # its features are stabilised by the largest key of the whole row, through which no gradient flows
    assert red(report) == {"causal"}
    assert report["causal"].measured is not None
    assert report["causal"].measured > 1e-5
    assert leak_by_hand(net.eval(), 64) > 1e-5


@pytest.mark.parametrize("shift", [0, 1])
def test_x_transformers_with_shifted_tokens_decodes_something_else(shift: int) -> None:
    x = installed("x_transformers")
    layers = x.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, shift_tokens=shift)
    net = x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        # as its own generate does: all tokens so far, and the cache
        before, cache = state
        full = torch.cat([before, tokens], dim=1)
        logits, cache = net(full, cache=cache, return_intermediates=True)
        return logits[:, -tokens.shape[1] :], (full, cache)

    def init_state(batch: int) -> Any:
        return torch.zeros(batch, 0, dtype=torch.long), None

    adapter = Adapter(logits=net, vocab=VOCAB, max_length=64, step=step, init_state=init_state, chunked=False)
    report = mf.check(adapter, only=[*CAUSAL, "cached", "prefill"])
    assert red(report) == ({"cached", "prefill"} if shift else set())
    if shift:
        assert report["cached"].measured is not None
        assert report["cached"].measured > 1e-2
        assert "token 1" in report["cached"].sentence


def test_x_transformers_generates_other_text_with_its_cache() -> None:
    x = installed("x_transformers")
    layers = x.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, shift_tokens=1)
    net = x.AutoregressiveWrapper(x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)).eval()
    prompt = torch.randint(VOCAB, (4, 5))
    with_cache, without = (net.generate(prompt, 30, temperature=0.0, cache_kv=cached) for cached in (True, False))
    assert not torch.equal(with_cache, without)
