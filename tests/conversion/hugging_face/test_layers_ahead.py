"""The layers of DeepSeek-V3 that predict further tokens, against the class of `transformers` that drafts with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_foreign_models import CASES, LENGTH, VOCAB, saved
from torch import Tensor, nn

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import export_model, import_model
from manyformer.models.ahead import SequentialAhead

pytestmark = pytest.mark.oracle

DEPTH = CASES["deepseek"][1]["num_hidden_layers"]
AHEAD = 2
OURS = {"post_norm.weight": "shared_head.norm.weight"}


def mtp_model(main: Any) -> Any:
    """The class's layers with random weights on a model of it."""
    from transformers.modeling_layers import MtpModel

    main.config.num_mtp_layers = AHEAD
    main.config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = MtpModel(main, AHEAD).eval()
    own: list[nn.Parameter] = list(model.layers.parameters())
    with torch.no_grad():
        for weight in own:
            # experts have no initial values before they are loaded
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.ndim == 1))
        for name, buffer in model.layers.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    return model


def released_names(model: Any) -> dict[str, Tensor]:
    """The tensors of the layers under the names of released files, with a matrix for each expert."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.layers.state_dict().items():
        number, _, part = name.partition(".")
        part = OURS.get(part, part.removeprefix("mtp_block."))
        prefix = f"model.layers.{DEPTH + int(number)}"
        if part.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = up.contiguous()
        elif part.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = down.contiguous()
        else:
            tensors[f"{prefix}.{part}"] = tensor
        tensors[f"{prefix}.embed_tokens.weight"] = torch.zeros(2, 2)
        tensors[f"{prefix}.shared_head.head.weight"] = torch.zeros(2, 2)
    return tensors


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder as released ones are, its model, and its layers ahead."""
    folder = tmp_path_factory.mktemp("deepseek")
    main = saved("deepseek", folder)
    ahead = mtp_model(main)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **released_names(ahead)}, file, metadata={"format": "pt"})
    return folder, main, ahead


def test_the_chain_computes_what_the_class_computes(released: tuple[Path, Any, Any]) -> None:
    from transformers.cache_utils import MtpCache

    folder, main, ahead = released
    model: Any = import_model(folder).model
    assert model.spec.keywords["ahead"] == "sequential"
    assert isinstance(model.auxiliary, SequentialAhead)
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    with torch.no_grad():
        hidden = main.model(tokens).last_hidden_state
        own_hidden = model.hidden(tokens).y
        positions = mf.models.embedding.positions_of(tokens, None, None)[0]
        chain = list(model.auxiliary.chain(own_hidden, model.embed(tokens, positions), positions))
        cache = MtpCache(config=main.config.get_mtp_config())
        for depth, states in enumerate(chain, 1):
            columns = torch.arange(depth, LENGTH)[None]
            hidden = ahead.forward_layer(depth - 1, hidden[:, :-1], columns, cache, input_ids=tokens[:, depth:])
            torch.testing.assert_close(states.hidden, hidden, atol=2e-5, rtol=1e-5)
    assert len(chain) == AHEAD


def test_exports_have_the_layers_again(released: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder = released[0]
    model: Any = import_model(folder).model
    export_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == AHEAD
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert not [
        name for name in before.keys() - after.keys() if not name.endswith(("embed_tokens.weight", "head.weight"))
    ]
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_a_file_without_the_layers_gives_a_model_without_them(tmp_path: Path) -> None:
    """Configs go on counting layers that files have lost."""
    saved("deepseek", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    model: Any = import_model(tmp_path).model
    assert model.auxiliary is None


def test_layers_side_by_side_are_not_exported(tmp_path: Path) -> None:
    model = mf.build("deepseek", vocab=8, dim=8, depth=1, heads=1, num_experts=4, ahead="parallel")
    with pytest.raises(UserError, match="ahead is parallel, and a DeepseekV3ForCausalLM has layers ahead in a chain"):
        export_model(model, tmp_path, model_type="deepseek_v3")
