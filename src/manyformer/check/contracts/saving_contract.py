"""What is saved comes back."""

import json
import tempfile

import torch
from torch import Tensor, nn

from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, failed, passed
from manyformer.models import Model
from manyformer.recipes import build


@contract("saving", "a saved and loaded model gives the same bits", needs=("saving",))
def saving(trial: ContractTrial) -> ContractFinding:
    """Save, load, call: equal in every bit, and made in the same way."""
    inputs = trial.draw(2, trial.length)
    with tempfile.TemporaryDirectory() as folder:
        trial.subject.save_to(folder)
        again = trial.subject.copy_from(folder)
    apart = float((trial.subject(inputs).logits - again(inputs).logits).abs().max())
    if apart or apart != apart:
        return failed(f"the loaded model differs by {apart:.1e}", apart, 0.0)
    one, two = trial.subject.module, again.module
    if isinstance(one, Model) and isinstance(two, Model) and one.spec != two.spec:
        return failed(f"the loaded model was made as {two.spec}, not {one.spec}")
    return passed("the loaded model gives the same bits", apart, 0.0)


@contract("spec", "the spec says all that is needed to make the model again", needs=("spec",))
def spec(trial: ContractTrial) -> ContractFinding:
    """Recipe and keywords survive JSON, and build parameters of the same names and shapes."""
    model = trial.subject.module
    assert isinstance(model, Model)
    recipe, keywords = model.spec
    try:
        told = json.loads(json.dumps(keywords))
    except TypeError as error:
        return failed(f"the keywords are not JSON: {error}")
    if changed := sorted(name for name in keywords if told[name] != keywords[name]):
        return failed(f"the keyword {changed[0]} ({keywords[changed[0]]!r}) does not survive JSON")
    again = build(recipe, **told)
    if again.spec != model.spec:
        return failed(f"building {model.spec} gives {again.spec}")
    mine, theirs = _shapes(model), _shapes(again)
    if different := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
        name = different[0]
        return failed(f"{name} is {mine.get(name)} here and {theirs.get(name)} when built again")
    return passed(f"{len(mine)} tensors of the same names and shapes from {recipe} and {len(told)} keywords")


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    tensors: dict[str, Tensor] = module.state_dict()
    return {name: tensor.shape for name, tensor in tensors.items()}
