"""What a model consists of and what it costs, told without computing anything: parameters, structure, operations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyformer.core import State, tree_map
from manyformer.dependency_trees import preorder_columns
from manyformer.flops import count_flops
from manyformer.models import EncoderDecoder, ImageClassifier, LanguageModel, Model, Tagger
from manyformer.recipes import RECIPES, build
from manyformer.training_hooks import eval_mode


@dataclass(frozen=True)
class ModuleRow:
    """One module of a model: its name, how deep it lies, what it is, and how many parameters are at home in it.

    `times` counts equal neighbours that are told once; `parameters` is the sum over all of them. A parameter that
    several modules share is at home where it is met first; `note` says so at the others.
    """

    name: str
    level: int
    kind: str
    parameters: int
    times: int = 1
    note: str = ""


class ForwardCost(NamedTuple):
    """One forward pass over one sequence of `length`: operations (a multiply-add counts two), and the state after it.

    `state_bytes` is the state's size in float32 after `length` tokens, of which each token adds `bytes_per_token`;
    both are None for a model without a state.
    """

    length: int
    flops: int
    state_bytes: int | None
    bytes_per_token: float | None


def build_on_meta(recipe: str, keywords: dict[str, Any]) -> Model:
    """The model without its numbers, on the `meta` device: quick and free of memory, however large it is."""
    with torch.device("meta"):
        return build(recipe, **keywords)


def count_parameters(model: nn.Module) -> int:
    """How many numbers are learned; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def module_rows(model: nn.Module) -> list[ModuleRow]:
    """The modules of `model` from the top down, equal neighbours once."""
    homes = {id(parameter): name for name, parameter in model.named_parameters()}
    return list(_parts(model, "", 0, homes))


def _parts(module: nn.Module, prefix: str, level: int, homes: dict[int, str]) -> Iterator[ModuleRow]:
    names_of: dict[int, str] = {}
    for names in _runs_of_equals(module):
        first, where = module.get_submodule(names[0]), f"{prefix}{names[0]}"
        if id(first) in names_of:
            yield ModuleRow(names[0], level, _kind(first), 0, note=f"the same as {names_of[id(first)]}")
            continue
        names_of[id(first)] = where
        label = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        fresh = sum(_at_home(module.get_submodule(name), f"{prefix}{name}.", homes) for name in names)
        note = _sharing(first, f"{where}.", homes)
        yield ModuleRow(label, level, _kind(first), fresh, len(names), note)
        yield from _parts(first, f"{where}.", level + 1, homes)


def _runs_of_equals(module: nn.Module) -> list[list[str]]:
    """The names of the children, numbered neighbours of the same structure together."""
    runs: list[list[str]] = []
    drawn = ""
    # not named_children, which leaves out the second name of a module that stands in two places
    for name, child in module._modules.items():
        if child is None:
            continue
        if runs and name.isdigit() and runs[-1][-1].isdigit() and repr(child) == drawn:
            runs[-1].append(name)
        else:
            runs.append([name])
            drawn = repr(child)
    return runs


def _at_home(module: nn.Module, prefix: str, homes: dict[int, str]) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if homes[id(parameter)].startswith(prefix))


def _sharing(module: nn.Module, prefix: str, homes: dict[int, str]) -> str:
    """Which of the module's own parameters are at home elsewhere."""
    shared = [
        f"{name} is {homes[id(parameter)]}"
        for name, parameter in module.named_parameters(recurse=False)
        if homes[id(parameter)] != f"{prefix}{name}"
    ]
    return ", ".join(shared)


def _kind(module: nn.Module) -> str:
    name, extra = type(module).__name__, module.extra_repr()
    return f"{name}({extra})" if extra and "\n" not in extra else name


def forward_cost(model: Model, length: int) -> ForwardCost:
    """What one forward pass over one sequence of `length` tokens costs; for a translation both sides are that long.

    It is a pass without dropout, not the first one; for a classifier of images that of one image, whatever the length.
    Raises ValueError where the model allows no such length. `model` may be a `build_on_meta`; where what is computed
    depends on what the tokens are like, a sketch is made real, by a fixed seed."""
    model.check_length(length)
    content_based = any(getattr(part, "content_based", False) for part in model.modules())
    if content_based and model.device.type == "meta":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build(model.spec.recipe, **model.spec.keywords).eval()
    tokens = torch.zeros(1, length, dtype=torch.long, device=model.device)
    if content_based:
        tokens = torch.arange(length, device=model.device)[None] % model.spec.keywords["vocab"]
    if isinstance(model, ImageClassifier):
        assert model.max_length is not None
        length = model.max_length
    with torch.no_grad(), eval_mode(model):
        # first what later passes find made: plans of sparse attention, for which a counter would take ten times as
        # long, and what is remembered for as long as weights stay as they are
        _pass(model, tokens)
        flops = count_flops(lambda: _pass(model, tokens))
    half = max(1, length // 2)
    card = RECIPES[model.spec.recipe].card
    if not isinstance(model, LanguageModel | EncoderDecoder) or not card.incremental_decoding or half == length:
        return ForwardCost(length, flops, None, None)
    early, late = (_state_bytes(model, tokens, upto) for upto in (half, length))
    return ForwardCost(length, flops, late, (late - early) / (length - half))


def _pass(model: Model, tokens: Tensor) -> None:
    if isinstance(model, EncoderDecoder):
        model(tokens, tokens)
    elif isinstance(model, ImageClassifier):
        model(torch.zeros(1, *model.embed.shape, dtype=torch.uint8, device=tokens.device))
    elif isinstance(model, Tagger):
        # which tree it is makes no difference
        model(tokens, None, torch.from_numpy(preorder_columns(range(tokens.shape[1])))[None].to(tokens.device))
    else:
        model(tokens)


def _state_bytes(model: LanguageModel | EncoderDecoder, tokens: Tensor, upto: int) -> int:
    with torch.no_grad():
        state: State = model.init_state(1)
        if isinstance(model, EncoderDecoder):
            state = model.decode(tokens[:, :upto], model.encode(tokens), None, state).state
        else:
            state = model(tokens[:, :upto], None, state).state
    sizes: list[int] = []

    def measure(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    tree_map(measure, state)
    return sum(sizes)
