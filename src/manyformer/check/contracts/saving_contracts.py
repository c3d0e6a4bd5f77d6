"""The contracts that a saved model loads as the same model, and that its spec rebuilds it."""

import json

import torch
from torch import Tensor, nn

from manyformer.check.trial import ContractFinding, ContractTrial, contract, failed, passed
from manyformer.files.json_text import json_text
from manyformer.recipes import build
from manyformer.system.temporary_folders import temporary_folder


@contract("saving", "a saved and loaded model gives the same bits", needs=("saving",))
def saving(trial: ContractTrial) -> ContractFinding:
    """Compare a saved and loaded model, whose outputs must agree in every bit and whose spec must be equal."""
    inputs = trial.draw(2, trial.length)
    with temporary_folder() as folder:
        trial.subject.save_to(str(folder))
        loaded = trial.subject.copy_from(str(folder))
    difference = float((trial.subject(inputs).logits - loaded(inputs).logits).abs().max())
    if difference or difference != difference:
        return failed(f"the loaded model differs by {difference:.1e}", difference, 0.0)
    saved_model = trial.subject.model
    loaded_model = loaded.model
    if saved_model is not None and loaded_model is not None and saved_model.spec != loaded_model.spec:
        return failed(f"the loaded model has the spec {loaded_model.spec}, not {saved_model.spec}")
    return passed("the loaded model gives the same bits", difference, 0.0)


@contract("spec", "the spec is sufficient to build the model again", needs=("spec",))
def spec(trial: ContractTrial) -> ContractFinding:
    """Build the model from its recipe and keywords after a round trip through JSON; names and shapes must be equal."""
    model = trial.subject.model
    assert model is not None
    recipe, keywords, _ = model.spec
    try:
        restored = json.loads(json_text(keywords))
    except TypeError as error:
        return failed(f"the keywords are not JSON: {error}")
    if changed := sorted(name for name in keywords if restored[name] != keywords[name]):
        return failed(f"the keyword {changed[0]} ({keywords[changed[0]]!r}) does not survive JSON")
    rebuilt = build(recipe, **restored)
    if rebuilt.spec != model.spec:
        return failed(f"building {model.spec} gives {rebuilt.spec}")
    shapes = _tensor_shapes(model)
    rebuilt_shapes = _tensor_shapes(rebuilt)
    if different := shapes.items() ^ rebuilt_shapes.items():
        name = min(name for name, _ in different)
        return failed(f"{name} is {shapes.get(name)} in this model and {rebuilt_shapes.get(name)} in the rebuilt one")
    return passed(f"{len(shapes)} tensors of the same names and shapes from {recipe} and {len(restored)} keywords")


def _tensor_shapes(module: nn.Module) -> dict[str, torch.Size]:
    tensors: dict[str, Tensor] = module.state_dict()
    return {name: tensor.shape for name, tensor in tensors.items()}
