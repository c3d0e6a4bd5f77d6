"""Small decoders of `transformers`, of every family that is read."""

from pathlib import Path
from typing import Any

from tiny_models import tiny_model

VOCAB, LENGTH = 60, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
GPT2_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
}
GPT_OSS = {
    **SIZES,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5},
}
QWEN3_NEXT = {
    **SIZES,
    "head_dim": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    # with 1e-6 the norm of a nearly empty memory makes differences of 1e-4 out of rounding
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**GPT2, **GPT2_TOKENS}),
    "gpt2-wide": ("GPT2", {**GPT2, **GPT2_TOKENS, "n_inner": 40, "activation_function": "gelu"}),
    "llama": ("Llama", SIZES),
    "llama-tied": ("Llama", {**SIZES, "attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "llama-yarn": ("Llama", {**SIZES, "rope_parameters": YARN}),
    "llama3": ("Llama", {**SIZES, "rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 8}),
    "ministral": (
        "Ministral",
        {
            **SIZES,
            "sliding_window": 8,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
    "smollm3": ("SmolLM3", SIZES),
    "gemma2": (
        "Gemma2",
        {
            **SIZES,
            "head_dim": 12,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **SIZES,
            "head_dim": 12,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 8}),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-yarn": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek-sparse": (
        "DeepseekV32",
        {**DEEPSEEK, "index_topk": 7, "index_n_heads": 24, "index_head_dim": 12},
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-yarn": (
        "GptOss",
        {
            **GPT_OSS,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen3-next": ("Qwen3Next", QWEN3_NEXT),
    "qwen3-next-order": (
        "Qwen3Next",
        {
            **QWEN3_NEXT,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
        },
    ),
    "mamba": (
        "Mamba",
        {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5, "expand": 3},
    ),
    "diffllama": ("DiffLlama", SIZES),
    "diffllama-full": ("DiffLlama", {**SIZES, "num_key_value_heads": 4, "head_dim": 12, "tie_word_embeddings": True}),
}
"""A class and its config, by the name of the case."""


def foreign_model(case: str) -> Any:
    """The model of a case."""
    name, settings = CASES[case]
    return tiny_model("GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM", **settings)


def saved(case: str, folder: Path, **options: Any) -> Any:
    """The model of a case, saved in a folder."""
    model = foreign_model(case)
    model.save_pretrained(folder, **options)
    return model
