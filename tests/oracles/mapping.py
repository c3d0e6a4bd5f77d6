"""The tensors of other people's models under our names.

Every function is linear in the tensors it is given, so it maps gradients as well as weights, and complete: loading its
result with `load_state_dict(strict=True)` leaves nothing to chance.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from manyformer.position import convert_pairs

Tensors = Mapping[str, Tensor]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    return dict(module.state_dict())


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, zero for what took no part."""
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in module.named_parameters()
    }


def gpt2(theirs: Tensors) -> dict[str, Tensor]:
    """`transformers.GPT2LMHeadModel` as `transformer-lm`; its matrices are transposed, q, k and v are one."""
    token = theirs["transformer.wte.weight"]
    ours = {"embed.token.weight": token, "head.weight": token}
    ours["embed.position.weight"] = theirs["transformer.wpe.weight"]
    for i in _numbers(theirs, "transformer.h."):
        old, new = f"transformer.h.{i}", f"body.{i}"
        packed = {kind: _straight(theirs[f"{old}.attn.c_attn.{kind}"]) for kind in ("weight", "bias")}
        dim = packed["bias"].shape[0] // 3
        for kind, value in packed.items():
            ours[f"{new}.attention.inner.q_proj.{kind}"] = value[:dim]
            ours[f"{new}.attention.inner.kv_proj.{kind}"] = value[dim:]
            ours[f"{new}.attention.inner.out_proj.{kind}"] = _straight(theirs[f"{old}.attn.c_proj.{kind}"])
            ours[f"{new}.ff.inner.up.{kind}"] = _straight(theirs[f"{old}.mlp.c_fc.{kind}"])
            ours[f"{new}.ff.inner.down.{kind}"] = _straight(theirs[f"{old}.mlp.c_proj.{kind}"])
            ours[f"{new}.attention.pre_norm.{kind}"] = theirs[f"{old}.ln_1.{kind}"]
            ours[f"{new}.ff.pre_norm.{kind}"] = theirs[f"{old}.ln_2.{kind}"]
    return ours | _renamed(theirs, {"transformer.ln_f": "body.norm.inner"})


def bert(theirs: Tensors) -> dict[str, Tensor]:
    """`transformers.BertForMaskedLM` as `bert`, without sentence types: fold them into the positions first."""
    token = theirs["bert.embeddings.word_embeddings.weight"]
    ours = {"embed.token.weight": token, "head.weight": token, "head.bias": theirs["cls.predictions.bias"]}
    ours["embed.position.weight"] = theirs["bert.embeddings.position_embeddings.weight"]
    for i in _numbers(theirs, "bert.encoder.layer."):
        old, new = f"bert.encoder.layer.{i}", f"body.{i}"
        ours |= _attention(theirs, f"{old}.attention", f"{new}.attention.inner", BERT_NAMES)
        names = {
            f"{old}.attention.output.LayerNorm": f"{new}.attention.post_norm",
            f"{old}.intermediate.dense": f"{new}.ff.inner.up",
            f"{old}.output.dense": f"{new}.ff.inner.down",
            f"{old}.output.LayerNorm": f"{new}.ff.post_norm",
        }
        ours |= _renamed(theirs, names)
    names = {
        "bert.embeddings.LayerNorm": "embed.norm",
        "cls.predictions.transform.dense": "head.transform.0",
        "cls.predictions.transform.LayerNorm": "head.transform.2",
    }
    return ours | _renamed(theirs, names)


def roformer(theirs: Tensors) -> dict[str, Tensor]:
    """`transformers.RoFormerForMaskedLM` as `roformer`: a BERT without positions at the embedding."""
    as_bert = {name.replace("roformer.", "bert.", 1): value for name, value in theirs.items()}
    as_bert["bert.embeddings.position_embeddings.weight"] = torch.empty(0)
    ours = bert(as_bert)
    del ours["embed.position.weight"]
    return ours


def llama(theirs: Tensors, *, dim: int, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """`transformers.LlamaForCausalLM` with tied words as `compose`, whose words are scaled by sqrt(dim) coming in.

    Its pairs are halves and ours neighbours; its projections have no bias.
    """
    token = theirs["model.embed_tokens.weight"] / dim**0.5
    ours = {"embed.token.weight": token, "head.weight": token, "body.norm.inner.weight": theirs["model.norm.weight"]}
    for i in _numbers(theirs, "model.layers."):
        old, new = f"model.layers.{i}", f"body.{i}"
        attention = {kind: theirs[f"{old}.self_attn.{kind}_proj.weight"] for kind in "qkvo"}
        k = convert_pairs(attention["k"], kv_heads, to="interleaved")
        ours[f"{new}.attention.inner.q_proj.weight"] = convert_pairs(attention["q"], heads, to="interleaved")
        ours[f"{new}.attention.inner.kv_proj.weight"] = torch.cat([k, attention["v"]])
        ours[f"{new}.attention.inner.out_proj.weight"] = attention["o"]
        for name in ("q_proj", "kv_proj", "out_proj"):
            weight = ours[f"{new}.attention.inner.{name}.weight"]
            ours[f"{new}.attention.inner.{name}.bias"] = weight.new_zeros(weight.shape[0])
        for name in ("gate", "up", "down"):
            ours[f"{new}.ff.inner.{name}.weight"] = theirs[f"{old}.mlp.{name}_proj.weight"]
        ours[f"{new}.attention.pre_norm.weight"] = theirs[f"{old}.input_layernorm.weight"]
        ours[f"{new}.ff.pre_norm.weight"] = theirs[f"{old}.post_attention_layernorm.weight"]
    return ours


def marian(theirs: Tensors) -> dict[str, Tensor]:
    """`transformers.MarianMTModel` with shared embeddings as `transformer`; its output bias is left out."""
    token = theirs["model.shared.weight"]
    ours = dict.fromkeys(("embed_source.token.weight", "embed_target.token.weight", "head.weight"), token)
    for side in ("encoder", "decoder"):
        for i in _numbers(theirs, f"model.{side}.layers."):
            old, new = f"model.{side}.layers.{i}", f"{side}.{i}"
            ours |= _attention(theirs, f"{old}.self_attn", f"{new}.attention.inner", BART_NAMES)
            names = {
                f"{old}.self_attn_layer_norm": f"{new}.attention.post_norm",
                f"{old}.fc1": f"{new}.ff.inner.up",
                f"{old}.fc2": f"{new}.ff.inner.down",
                f"{old}.final_layer_norm": f"{new}.ff.post_norm",
            }
            if side == "decoder":
                ours |= _attention(theirs, f"{old}.encoder_attn", f"{new}.cross.inner", BART_NAMES)
                names[f"{old}.encoder_attn_layer_norm"] = f"{new}.cross.post_norm"
            ours |= _renamed(theirs, names)
    return ours


def t5(theirs: Tensors, *, dim: int) -> dict[str, Tensor]:
    """`transformers.T5ForConditionalGeneration` as `t5`, whose words are scaled by sqrt(dim) coming in."""
    token, head = theirs["shared.weight"] / dim**0.5, theirs["lm_head.weight"]
    is_tied = torch.equal(head, theirs["shared.weight"])
    ours = dict.fromkeys(("embed_source.token.weight", "embed_target.token.weight"), token)
    ours["head.weight"] = token if is_tied else head
    for side, blocks in (("encoder", ("attention", "ff")), ("decoder", ("attention", "cross", "ff"))):
        ours[f"{side}.norm.inner.weight"] = theirs[f"{side}.final_layer_norm.weight"]
        table = theirs[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        for i in _numbers(theirs, f"{side}.block."):
            ours[f"{side}.{i}.attention.inner.position.weight"] = table
            for j, block in enumerate(blocks):
                old, new = f"{side}.block.{i}.layer.{j}", f"{side}.{i}.{block}"
                ours[f"{new}.pre_norm.weight"] = theirs[f"{old}.layer_norm.weight"]
                ours |= _t5_branch(theirs, old, f"{new}.inner", block)
    return ours


def _t5_branch(theirs: Tensors, old: str, new: str, block: str) -> dict[str, Tensor]:
    if block == "ff":
        names = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}
        old = f"{old}.DenseReluDense"
        present = {name: our_name for name, our_name in names.items() if f"{old}.{name}.weight" in theirs}
        return {f"{new}.{our_name}.weight": theirs[f"{old}.{name}.weight"] for name, our_name in present.items()}
    old = f"{old}.{'SelfAttention' if block == 'attention' else 'EncDecAttention'}"
    q, k, v, out = (theirs[f"{old}.{name}.weight"] for name in "qkvo")
    return {f"{new}.q_proj.weight": q, f"{new}.kv_proj.weight": torch.cat([k, v]), f"{new}.out_proj.weight": out}


def multihead(theirs: Tensors) -> dict[str, Tensor]:
    """`torch.nn.MultiheadAttention` as `Attention`: q, k and v are packed in this order."""
    dim = theirs["out_proj.bias"].shape[0]
    ours = {}
    for kind in ("weight", "bias"):
        packed = theirs[f"in_proj_{kind}"]
        ours |= {
            f"q_proj.{kind}": packed[:dim],
            f"kv_proj.{kind}": packed[dim:],
            f"out_proj.{kind}": theirs[f"out_proj.{kind}"],
        }
    return ours


def torch_layer(theirs: Tensors, norm: str) -> dict[str, Tensor]:
    """`torch.nn.TransformerEncoderLayer` or `DecoderLayer` as a chain of residual branches.

    `norm` is where the norm of a branch stands: "pre_norm" or "post_norm".
    """
    branches = {"attention": "self_attn", "cross": "multihead_attn"}
    branches = {ours: name for ours, name in branches.items() if f"{name}.in_proj_weight" in theirs}
    ours: dict[str, Tensor] = {}
    for number, branch in enumerate([*branches, "ff"], start=1):
        ours |= _renamed(theirs, {f"norm{number}": f"{branch}.{norm}"})
    for branch, name in branches.items():
        inner = {key.removeprefix(f"{name}."): value for key, value in theirs.items() if key.startswith(f"{name}.")}
        ours |= {f"{branch}.inner.{key}": value for key, value in multihead(inner).items()}
    return ours | _renamed(theirs, {"linear1": "ff.inner.up", "linear2": "ff.inner.down"})


BERT_NAMES = ("self.query", "self.key", "self.value", "output.dense")
BART_NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


def _attention(theirs: Tensors, old: str, new: str, names: tuple[str, str, str, str]) -> dict[str, Tensor]:
    """Four projections as our three: keys and values are one matrix."""
    ours = {}
    for kind in ("weight", "bias"):
        q, k, v, out = (theirs[f"{old}.{name}.{kind}"] for name in names)
        ours |= {f"{new}.q_proj.{kind}": q, f"{new}.kv_proj.{kind}": torch.cat([k, v]), f"{new}.out_proj.{kind}": out}
    return ours


def _renamed(theirs: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    return {f"{new}.{kind}": theirs[f"{old}.{kind}"] for old, new in names.items() for kind in ("weight", "bias")}


def _straight(value: Tensor) -> Tensor:
    """A weight of `Conv1D`, stored input first, as `nn.Linear` stores it; a bias is left alone."""
    return value.T if value.ndim == 2 else value


def _numbers(theirs: Tensors, prefix: str) -> Iterator[int]:
    """The layer numbers below `prefix`."""
    return iter(sorted({int(name.removeprefix(prefix).split(".")[0]) for name in theirs if name.startswith(prefix)}))


def longformer(theirs: Tensors) -> dict[str, Tensor]:
    """`transformers.LongformerForMaskedLM` as `longformer`: a BERT with more projections.

    Its positions are counted from the padding's number on, and its one token type is folded into them.
    """
    transform = "cls.predictions.transform"
    head = {"lm_head.dense": f"{transform}.dense", "lm_head.layer_norm": f"{transform}.LayerNorm"}
    as_bert = {name.replace("longformer.", "bert.", 1): value for name, value in theirs.items()}
    as_bert |= _renamed(theirs, head) | {"cls.predictions.bias": theirs["lm_head.bias"]}
    ours = bert(as_bert)
    positions = theirs["longformer.embeddings.position_embeddings.weight"][2:]
    ours["embed.position.weight"] = positions + theirs["longformer.embeddings.token_type_embeddings.weight"][0]
    for i in _numbers(theirs, "longformer.encoder.layer."):
        old, new = f"longformer.encoder.layer.{i}.attention.self", f"body.{i}.attention.inner"
        ours |= global_projections(theirs, f"{old}.", f"{new}.")
    return ours


def global_projections(theirs: Tensors, old: str, new: str) -> dict[str, Tensor]:
    """The second set of projections of a Longformer layer."""
    ours = {}
    for kind in ("weight", "bias"):
        q, k, v = (theirs[f"{old}{name}_global.{kind}"] for name in ("query", "key", "value"))
        ours |= {f"{new}global_q_proj.{kind}": q, f"{new}global_kv_proj.{kind}": torch.cat([k, v])}
    return ours
