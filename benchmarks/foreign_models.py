"""Check every family of Hugging Face models that takes tokens, built tiny with random weights.

Prints one row per family: contracts that passed, failed and were not run, and the reasons.

    python benchmarks/foreign_models.py
    python benchmarks/foreign_models.py --kinds causal --families gpt2 mixtral --length 128
"""

import argparse
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import manyformer as mf
from manyformer.base.errors import UserError

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "translation": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}

VOCAB, MAX_PARAMETERS = 96, 20_000_000

SIZES = {
    32: "hidden_size d_model n_embd dim emb_dim embedding_size emb_size word_embed_proj_dim moe_intermediate_size "
    "shared_expert_intermediate_size",
    48: "intermediate_size d_ff n_inner dff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size hidden_dim",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts",
    8: "head_dim d_kv kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim",
    VOCAB: "vocab_size",
}
"""Names of sizes in configurations, by their tiny values."""

LATENT = {"num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
AXIAL = {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]}

OTHER_SIZES: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bamba": MAMBA,
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "dots3_note_text": LATENT,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "encoder-decoder": {},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "mamba_d_state": 16},
    "falcon_mamba": {"state_size": 8},
    "funnel": {"num_hidden_layers": None, "num_blocks": None, "block_sizes": [1, 1]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": MAMBA,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "longcat_flash": {
        "expert_ffn_hidden_size": 48,
        "zero_expert_num": 2,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "moe_topk": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": 10},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minicpm3": LATENT,
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {"d_latents": 32, "num_latents": 8},
    "prophetnet": {"num_hidden_layers": None, "num_layers": None},
    "reformer": AXIAL,
    "xlstm": {"v_head_dim": None},
    "youtu": LATENT,
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes of families for which those of `SIZES` do not fit together; None leaves the default."""


class FamilyRow(NamedTuple):
    """The check of one family; `reasons` says why contracts failed or were not run, or why there is no model."""

    kind: str
    family: str
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def tiny_keywords(config: Any, other_sizes: dict[str, Any]) -> dict[str, Any]:
    """Tiny values for the sizes of a default configuration and of the configurations that it holds."""
    values = {name: size for size, names in SIZES.items() for name in names.split()}
    keywords: dict[str, Any] = {}
    for name, default in vars(config).items():
        if isinstance(default, transformers.PreTrainedConfig):
            kept = {
                key: getattr(default, key) for key in ("is_decoder", "add_cross_attention") if hasattr(default, key)
            }
            keywords[name] = tiny_keywords(default, {"model_type": default.model_type} | kept)
        elif name in values and isinstance(default, int):
            keywords[name] = values[name]
        elif name.endswith("_token_id") and isinstance(default, int) and default >= VOCAB:
            keywords[name] = 1
    return {name: value for name, value in (keywords | other_sizes).items() if value is not None}


def build_family(kind: str, family: str) -> nn.Module:
    """A tiny model of the family with random weights. Raises what the family raises, and UserError if it is large."""
    config_class, class_name = CONFIG_MAPPING[family], KINDS[kind][family]
    default, other_sizes = config_class(), dict(OTHER_SIZES.get(family, {}))
    if kind == "causal" and hasattr(default, "is_decoder"):
        other_sizes["is_decoder"] = True
    config = config_class(**tiny_keywords(default, other_sizes))
    model_class = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    if model_class.config_class is config_class.sub_configs.get("text_config"):
        config = config.get_text_config()
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in model_class(config).parameters())
    if parameters > MAX_PARAMETERS:
        raise UserError(f"its tiny configuration still has {parameters:,} parameters")
    torch.manual_seed(0)
    model: Any = model_class(config)
    if hasattr(model, "set_default_language"):
        model.set_default_language(config.languages[0])
    return model


def check_family(kind: str, family: str, length: int | None) -> FamilyRow:
    """Build a tiny model of the family and check it."""
    try:
        model = build_family(kind, family)
    except Exception as error:
        return FamilyRow(kind, family, reasons=(f"cannot be built: {type(error).__name__}: {_shorten(str(error))}",))
    try:
        report = mf.check(model, length=length, skip=["compile", "float16"])
    except UserError as error:
        return FamilyRow(kind, family, reasons=(f"cannot be checked: {_shorten(str(error))}",))
    names = {
        verdict: tuple(row.contract for row in report.rows if row.verdict == verdict)
        for verdict in ("passed", "failed", "not run")
    }
    # one reason may hold for all contracts
    reasons = {_shorten(row.sentence): row.contract for row in report.rows if row.verdict in ("failed", "not run")}
    sentences = tuple(f"{contract}: {sentence}" for sentence, contract in reasons.items())
    return FamilyRow(kind, family, names["passed"], names["failed"], names["not run"], sentences)


def _shorten(text: str) -> str:
    return " ".join(text.split())[:160]


def check_families(kinds: list[str], families: list[str], length: int | None) -> Iterator[FamilyRow]:
    """Check these families of these kinds, all by default."""
    for kind in kinds:
        for family in KINDS[kind]:
            if not families or family in families:
                yield check_family(kind, family, length)


def main() -> None:
    """Print the rows, and the number of families of each outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--families", nargs="*", default=[], help="all by default")
    parser.add_argument("--length", type=int, default=48, help="tokens in each sequence")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    outcomes: dict[str, int] = {}
    print(f"{'kind':12} {'family':28} {'passed':>6} {'failed':>6} {'not run':>7}  reasons")
    for row in check_families(arguments.kinds, arguments.families, arguments.length):
        counts = f"{len(row.passed):6} {len(row.failed):6} {len(row.not_run):7}"
        print(f"{row.kind:12} {row.family:28} {counts}  {'; '.join(row.reasons)}", flush=True)
        outcome = "failed" if row.failed else "not run" if not row.passed else "sound"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))


if __name__ == "__main__":
    main()
