"""Small models of `transformers` with random weights, of every family that is read."""

import logging
from pathlib import Path
from typing import Any

import torch


def tiny_model(name: str, **settings: Any) -> Any:
    """A model of a class in evaluation mode, whose weights, biases and norms are all random."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            # sinusoids are parameters there and no weights; this bias of a Reformer is in its files and not used
            if weight.requires_grad and not (name.startswith("Reformer") and weight_name == "lm_head.bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "final_logits_bias")):
                buffer.normal_(std=0.2)
    return model


def save_tiny(folder: Path, name: str, settings: dict[str, Any], **options: Any) -> Any:
    """A model of a class, saved in a folder."""
    model = tiny_model(name, **settings)
    model.save_pretrained(folder, **options)
    return model
