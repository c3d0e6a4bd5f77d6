"""The contract that a model's state holds all that is random in it, so that it can be saved and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.equivalence_contracts import largest_difference
from manyformer.analysis.contracts.isolation import restoring_values
from manyformer.analysis.contracts.subject import seed_everything
from manyformer.analysis.contracts.trial import ContractFinding, ContractTrial, contract, failed, join_names, passed
from manyformer.nn.model_inputs import Inputs


@contract("own-state", "a model loads its own state, and gives the same bits", needs=("module",))
def own_state(trial: ContractTrial) -> ContractFinding:
    """Overwrite all that is trained, load the state that the model had before its first call, and compare.

    What is no part of the state stays overwritten, as it would be other random numbers in a new model. If the subject
    can be built anew, two new models load the state too, in which tables that are no part of it are new as well.
    """
    module = trial.subject.module
    assert module is not None
    inputs = trial.draw(2, trial.length)
    state = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    ties = _tied_names(module)
    expected = trial.subject(inputs).logits
    unsaved = unregistered_weights(module)
    # a call may add tensors, such as caches, which a model that has not been called does not have
    state = module.state_dict() | state
    with restoring_values([*module.parameters(), *module.buffers(), *unsaved.values()]):
        _overwrite(trial, [*module.parameters(), *_saved_buffers(module), *unsaved.values()])
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            return failed(f"the model cannot load its own state: {' '.join(str(error).split())[:300]}")
        if apart := ties - _tied_names(module):
            return failed(f"loading a state unties {' and '.join(sorted(min(apart, key=sorted)))}")
        difference = largest_difference(trial.subject(inputs).logits, expected)
    if difference != 0 and unsaved:
        sentence = f"{join_names(list(unsaved))} is trained, but neither a parameter nor in the state"
        return failed(f"{sentence}: loaded, it differs by {difference:.1e}", difference, 0.0)
    if difference != 0:
        return failed(f"the model differs by {difference:.1e} after it has loaded its own state", difference, 0.0)
    return _load_new_models(trial, inputs, state)


def _load_new_models(trial: ContractTrial, inputs: Inputs, state: Mapping[str, Tensor]) -> ContractFinding:
    """Load the state into two new models, which must agree whatever random numbers they began with.

    They are not compared with the model under test: nobody knows whether it was built with the same settings.
    """
    logits: list[Tensor] = []
    for seed in (trial.subject.seed + 1, trial.subject.seed + 2):
        seed_everything(seed)
        new = trial.subject.build_anew()
        if new is None or new.module is None:
            return passed("the model gives the same bits after it has loaded its own state", 0.0, 0.0)
        try:
            new.module.eval().load_state_dict(state)
            logits.append(new(inputs).logits)
        # built with other settings, it has other weights or forms
        except Exception:
            return passed("the model gives the same bits after it has loaded its own state", 0.0, 0.0)
    difference = largest_difference(*logits)
    if difference != 0:
        sentence = f"two new models that have loaded the same state differ by {difference:.1e}"
        return failed(f"{sentence}: something random is in no state", difference, 0.0)
    return passed("the model, and new ones alike, give the same bits after they have loaded its state", 0.0, 0.0)


def _overwrite(trial: ContractTrial, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            # in the range of weights: no overflow where the old values come back
            tensor.detach().copy_(torch.rand(tensor.shape, generator=trial.generator))


def _saved_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers that are in the state; others are computed by the constructor again."""
    names = module.state_dict().keys()
    return [buffer for name, buffer in module.named_buffers() if name in names]


def _tied_names(module: nn.Module) -> set[frozenset[str]]:
    """The names of each parameter that has several."""
    names: dict[int, set[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), set()).add(name)
    return {frozenset(tied) for tied in names.values() if len(tied) > 1}


def unregistered_weights(module: nn.Module) -> dict[str, Tensor]:
    """Trained tensors in plain lists, tuples and dictionaries of a module, which are none of its parameters."""
    known = {id(weight) for weight in module.parameters()}
    known |= {id(submodule) for submodule in module.modules()}
    found: dict[str, Tensor] = {}

    def look(name: str, value: object) -> None:
        if id(value) in known:
            return
        if isinstance(value, Tensor):
            if value.is_leaf and value.requires_grad:
                found[name] = value
        elif isinstance(value, nn.Module):
            weights = value.named_parameters()
            found.update({f"{name}.{inner}": w for inner, w in weights if w.requires_grad and id(w) not in known})
        elif isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                look(f"{name}[{key!r}]", item)

    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if not name.startswith("_"):
                look(f"{path}.{name}" if path else name, value)
    return found
