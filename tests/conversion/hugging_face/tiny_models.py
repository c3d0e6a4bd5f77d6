"""Small models of `transformers` with random weights, of every family that is read."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manyformer.conversion.hugging_face import export_model, import_model


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


def exported(
    model: Any,
    folder: Path,
    assert_same: Callable[[Any, Any], None],
    *,
    model_type: str | None = None,
    missing: str = "nothing",
    unexpected: str = "nothing",
    rtol: float = 0,
) -> Any:
    """The model of `transformers` that an exported folder holds, the same as ours, as is the one imported from there.

    `missing` and `unexpected` are parts of the names of tensors that it may lack, or does not take. `rtol` is what a
    weight may lose on its way out and back."""
    import transformers

    export_model(model, folder, model_type=model_type)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    back, loading = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert all(missing in name for name in loading["missing_keys"])
    assert all(unexpected in name for name in loading["unexpected_keys"])
    assert_same(back.eval(), model)
    again = import_model(folder).model
    assert again.labels == model.labels
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=rtol, atol=0)
    return back
