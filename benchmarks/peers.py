"""Released models of the same size as ours, and how each of them writes.

They come with `pip install "manyformer[hf,peers]"`; nothing in the library itself imports them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import manyformer as mf


class Size(NamedTuple):
    """What all models have in common."""

    dim: int
    depth: int
    heads: int
    vocab: int
    max_length: int


def ours(size: Size) -> nn.Module:
    """`transformer-lm`."""
    return mf.build("transformer-lm", **size._asdict())


def gpt2(size: Size) -> nn.Module:
    """`transformers.GPT2LMHeadModel` on torch's fused attention, without dropout and special tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocab,
        n_embd=size.dim,
        n_layer=size.depth,
        n_head=size.heads,
        n_positions=size.max_length,
        attn_implementation="sdpa",
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        # training has no use for a cache
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def x_transformers(size: Size) -> nn.Module:
    """`x_transformers.TransformerWrapper` with a causal decoder and `attn_flash=True`."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=size.dim, depth=size.depth, heads=size.heads, attn_dim_head=size.dim // size.heads, attn_flash=True
    )
    return TransformerWrapper(num_tokens=size.vocab, max_seq_len=size.max_length, attn_layers=layers)


MODELS: dict[str, Callable[[Size], nn.Module]] = {"ours": ours, "x-transformers": x_transformers, "GPT-2": gpt2}


def writer_of(name: str, model: nn.Module, prompt: Tensor, new: int) -> Callable[[], Tensor]:
    """Greedy decoding of `new` tokens after `prompt` (b, p) with everybody's own `generate` and cache."""
    model.eval()
    if name == "ours":

        def write() -> Tensor:
            return torch.tensor(mf.generate(model, list(prompt), max_new=new).tokens)  # type: ignore[arg-type]

    elif name == "GPT-2":
        words: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": True}

        def write() -> Tensor:
            mask = torch.ones_like(prompt)
            return model.generate(prompt, attention_mask=mask, **words)[:, prompt.shape[1] :]  # type: ignore[operator]

    else:
        from x_transformers.autoregressive_wrapper import AutoregressiveWrapper

        wrapper = AutoregressiveWrapper(model).eval()

        def write() -> Tensor:
            return wrapper.generate(prompt, new, temperature=0.0, cache_kv=True)

    return write
