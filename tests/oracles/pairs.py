"""Models of `transformers` with random weights, and ours with the same ones."""

from typing import Any

import torch
from mapping import by_family, weights_of
from torch import nn

import manyformer as mf
from manyformer.nn.positions import SinusoidalPosition

VOCAB, DIM, DEPTH, HEADS, HIDDEN, LONGEST = 53, 32, 3, 4, 80, 48
START, END = 1, 2


def shaken(module: nn.Module) -> Any:
    """Every parameter away from where it starts, so that no bias is zero and no norm the identity."""
    with torch.no_grad():
        for value in module.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value), alpha=0.2)
    return module.eval()


def gpt2_pair() -> tuple[Any, Any]:
    """`transformer-lm` and GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=DIM,
        n_layer=DEPTH,
        n_head=HEADS,
        n_inner=HIDDEN,
        n_positions=LONGEST,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=0,
    )
    reference = shaken(GPT2LMHeadModel(config))
    sizes = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "heads": HEADS, "ff_dim": HIDDEN, "max_length": LONGEST}
    ours = mf.build("transformer-lm", **sizes, gelu_approximate="tanh").eval()
    ours.load_state_dict(by_family("gpt2", ours, weights_of(reference)))
    return ours, reference


def bert_pair() -> tuple[Any, Any]:
    """`bert` and BERT."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        max_position_embeddings=LONGEST,
        attn_implementation="eager",
    )
    reference = shaken(BertForMaskedLM(config))
    ours = mf.build("bert", vocab=VOCAB, dim=DIM, depth=DEPTH, heads=HEADS, ff_dim=HIDDEN, max_length=LONGEST).eval()
    weights = weights_of(reference)
    # the sentence type of all tokens is one more vector at every position
    weights["bert.embeddings.position_embeddings.weight"] += reference.bert.embeddings.token_type_embeddings.weight[0]
    ours.load_state_dict(by_family("bert", ours, weights))
    with torch.no_grad():
        reference.bert.embeddings.position_embeddings.weight.copy_(ours.embed.position.weight)
        reference.bert.embeddings.token_type_embeddings.weight.zero_()
    return ours, reference


def marian_pair() -> tuple[Any, Any]:
    """`transformer` and Marian."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(3)
    config = MarianConfig(
        vocab_size=VOCAB,
        d_model=DIM,
        encoder_layers=DEPTH,
        decoder_layers=DEPTH,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
        max_position_embeddings=LONGEST,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=0,
        eos_token_id=END,
        forced_eos_token_id=None,
        decoder_start_token_id=START,
    )
    reference = shaken(MarianMTModel(config))
    ours = mf.build("transformer", vocab=VOCAB, dim=DIM, depth=DEPTH, heads=HEADS, ff_dim=HIDDEN).eval()
    ours.embed_source.position = ours.embed_target.position = SinusoidalPosition(DIM, layout="halves")
    ours.load_state_dict(by_family("marian", ours, weights_of(reference)))
    return ours, reference
