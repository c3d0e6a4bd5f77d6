"""Find out by trial how a module decodes with its cache.

Released models keep what they have read in one of a few ways: in themselves, to be emptied by a method; in buffers that
are allocated for a number of rows, with a position for each call; or in an object that a call returns and the next one
takes. A form counts as found if its first step gives what one pass gives; that later steps do is what is tested.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.call_forms import (
    POSITION_NAMES,
    FoundForm,
    find_logits,
    floating_tensors,
    one_line,
    set_up_caches,
)
from manyformer.analysis.contracts.isolation import restoring_buffers, restoring_model_and_rng

FIRST_STEP_TOLERANCE = 1e-3
"""The largest difference, relative to the logits, at which the first step is right: a wrong form is far off."""

FAULTY_STEP_TOLERANCE = 0.1
"""The largest difference at which a form that its names leave no doubt of is right, and what it computes is wrong."""

PREFIX = 12
"""Tokens before the first step of a trial."""

RESET = re.compile(r"(reset|clear|empty)_?(kv_?)?(cache|caches|state|states)")
UNDOUBTED = re.compile(r".*(kv|cache|past_key|pos)")
"""Names of parameters for caches of keys and values and for positions; memories may be no part of one pass."""

STEP = re.compile(
    r"(forward_|decode_|decoding_|recurrent_|inference_)?step|(step|forward|decode)_(one|token|recurrent)"
)
INITIAL = re.compile(r"(init|initial|make|new|empty|allocate)_(\w+_)?(hidden|states?|caches?)")
CACHE_PARAMETER = re.compile(r"(kv|cache|past|prev|hidden|state|memor)")
RETURN_FLAG = re.compile(r"return_\w*(kv|cache|past|prev|hidden|state|memor|intermediate)")


@final
@dataclass(frozen=True)
class Prefix:
    """The tokens of all rows so far, of which the last `new` have not been read, and what the call before gave."""

    tokens: Tensor
    new: int
    state: Any

    @property
    def new_tokens(self) -> Tensor:
        """The tokens that have not been read."""
        return self.tokens[:, self.tokens.shape[1] - self.new :]

    @property
    def position(self) -> int:
        """The position of the first token that has not been read."""
        return self.tokens.shape[1] - self.new


@final
@dataclass(frozen=True)
class CacheForm:
    """One way to decode with a cache.

    `begin(rows, length)` makes the module ready for new sequences and gives the first state; `step(prefix)` gives
    whatever the module gives and the next state. `in_module` means that the state is in the module itself, so that
    rows cannot be selected from it nor two sequences decoded by turns. `takes_prefix` means that a step gets all tokens
    so far, of which a module with a cache computes the last alone. `undoubted` means that the names of its parameters
    leave no doubt of the form.
    """

    name: str
    begin: Callable[[int, int], Any]
    step: Callable[[Prefix], tuple[Any, Any]]
    in_module: bool
    takes_prefix: bool = False
    undoubted: bool = False


@final
@dataclass(frozen=True)
class FoundCache:
    """The cache form of a module, with the width of its logits.

    With `one_token` a call takes one token. `first_step` is how far the first step is from one pass, and
    `reads_prefix` whether what was read before it, at once or as a first token, gives what one pass gives.
    """

    form: CacheForm
    width: int
    one_token: bool = False
    first_step: float = 0.0
    reads_prefix: bool = False

    def begin(self, rows: int, length: int) -> Any:
        """The state before the first token."""
        return self.form.begin(rows, length)

    def step(self, tokens: Tensor, new: int, state: Any) -> tuple[Tensor, Any]:
        """Logits (rows, new, width) of the last `new` of the tokens so far, and the next state."""
        if self.one_token and new > 1:
            steps = []
            length = tokens.shape[1]
            for end in range(length - new + 1, length + 1):
                logits, state = self.step(tokens[:, :end], 1, state)
                steps.append(logits)
            return torch.cat(steps, dim=1), state
        result, next_state = self.form.step(Prefix(tokens, new, state))
        found = read_step(result, tokens.shape[0], new, tokens.shape[1], self.width)
        if found is None:
            raise ValueError(f"{self.form.name} gave no {self.width} logits for {new} tokens")
        return found, next_state


def read_step(result: Any, rows: int, new: int, length: int, width: int) -> Tensor | None:
    """The logits of the new tokens in the result of a step, which may have those of the whole prefix or of the last."""
    tensors = list(floating_tensors(result))
    found = find_logits(tensors, rows, new, (width,))
    if found is not None:
        return found
    found = find_logits(tensors, rows, length, (width,))
    if found is not None:
        return found[:, length - new :]
    if new == 1:
        for tensor in tensors:
            if tuple(tensor.shape) == (rows, width):
                return tensor[:, None]
    return None


@torch.no_grad()
def find_cache(module: nn.Module, found: FoundForm) -> FoundCache | str:
    """The cache form of a module whose form of call is known, or the sentence why none was found."""
    length = max(PREFIX, found.min_length)
    with restoring_model_and_rng(module), restoring_buffers(module):
        device = next(module.parameters(), torch.zeros(())).device
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(found.vocabulary, (2, length + 1), generator=generator).to(device)
        padded = -(-(length + 1) // found.length_multiple) * found.length_multiple
        whole = torch.randint(found.vocabulary, (2, padded), generator=generator).to(device)
        whole[:, : length + 1] = tokens
        try:
            expected = found.logits(module, whole)[:, : length + 1]
        except Exception as error:
            return f"no cache was looked for: {padded} tokens raise {one_line(error)}"
        reasons: list[str] = []
        faulty: list[FoundCache] = []
        for form in cache_forms(module, found):
            cache = _try_form(FoundCache(form, found.width), tokens, expected, reasons)
            if cache is None:
                continue
            if cache.first_step <= FIRST_STEP_TOLERANCE:
                if not form.takes_prefix or _state_matters(cache, tokens, expected):
                    return cache
                reasons.append(f"{form.name}: the step does not depend on the cache")
            else:
                reasons.append(f"{form.name}: the first step is {cache.first_step:.0e} off")
                if form.undoubted and (cache.reads_prefix or cache.first_step <= FAULTY_STEP_TOLERANCE):
                    faulty.append(cache)
        for cache in sorted(faulty, key=lambda cache: (cache.form.takes_prefix, cache.first_step)):
            if _state_matters(cache, tokens, expected):
                return cache
    if not reasons:
        return "no form of a cache is among its parameters and methods"
    return "no form of a cache gives what one pass gives (" + "; ".join(reasons[:3]) + ")"


def _try_form(cache: FoundCache, tokens: Tensor, expected: Tensor, reasons: list[str]) -> FoundCache | None:
    """The cache with how far its first step is from one pass; the prefix is read at once, else token by token."""
    length = tokens.shape[1] - 1
    for one_token in (False, True):
        tried = replace(cache, one_token=one_token)
        try:
            state = tried.begin(tokens.shape[0], length + 1)
            prefix, state = tried.step(tokens[:, :length], length, state)
            logits, _ = tried.step(tokens, 1, state)
        except Exception as error:
            reasons.append(f"{cache.form.name}: {one_line(error)}")
            continue
        scale = expected.abs().max().clamp(min=1e-12)
        # of single steps, the first alone has no state that could be wrong
        read = 1 if one_token else length
        before = float((prefix[:, :read] - expected[:, :read]).abs().max() / scale)
        first_step = float((logits[:, 0] - expected[:, length]).abs().max() / scale)
        return replace(tried, first_step=first_step, reads_prefix=before <= FIRST_STEP_TOLERANCE)
    return None


def _state_matters(cache: FoundCache, tokens: Tensor, expected: Tensor) -> bool:
    """Whether a step over the whole prefix changes with the cache: one that ignores it is one pass, not decoding."""
    others = tokens.flip(1)
    _, state = cache.step(others[:, :-1], tokens.shape[1] - 1, cache.begin(*tokens.shape))
    try:
        logits, _ = cache.step(tokens, 1, state)
        _, state = cache.step(tokens[:, :-1], tokens.shape[1] - 1, cache.begin(*tokens.shape))
        right, _ = cache.step(tokens, 1, state)
    except Exception:
        return True
    scale = expected.abs().max().clamp(min=1e-12)
    return bool((logits - right).abs().max() > FIRST_STEP_TOLERANCE * scale)


def cache_forms(module: nn.Module, found: FoundForm) -> list[CacheForm]:
    """The forms that the names of a module's parameters and methods allow, in the order in which they are tried."""
    try:
        signature = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return []
    parameters = list(signature)
    forms: list[CacheForm] = []
    reset = _reset_method(module)
    if "use_cache" in parameters and reset is not None:
        forms.append(_kept_in_module(module, reset))
    position = next((name for name in parameters[1:] if name in POSITION_NAMES), None)
    if position is not None:
        forms += [_with_positions(module, position, as_tensor=as_tensor) for as_tensor in (True, False)]
    caches = [
        name
        for name in parameters[1:]
        # a switch such as `detach_memories` holds no cache
        if CACHE_PARAMETER.search(name)
        and not RETURN_FLAG.match(name)
        and not isinstance(signature[name].default, bool)
    ]
    flags = [name for name in parameters if RETURN_FLAG.match(name)] or [
        name for name in parameters if name == "use_cache"
    ]
    # one cache, or as many as the call returns, such as keys and values beside memories
    groups: list[tuple[str, ...]] = [(name,) for name in caches]
    if len(caches) > 1:
        groups.append(tuple(caches))
    for names in groups:
        for flag in (*flags, None):
            if position is not None:
                forms += [_returned(module, names, flag, position=position)]
            forms += [_returned(module, names, flag, whole_prefix=whole) for whole in (True, False)]
    return forms + [
        _by_method(module, name, as_vector=as_vector) for name in _steps(module) for as_vector in (True, False)
    ]


def _steps(module: nn.Module) -> list[str]:
    """The names of methods that take tokens and a state."""
    names = [name for name in dir(type(module)) if STEP.fullmatch(name)]
    return [name for name in names if len(inspect.signature(getattr(module, name)).parameters) == 2]


def _reset_method(module: nn.Module) -> Callable[[], Any] | None:
    for name in dir(type(module)):
        if RESET.fullmatch(name.strip("_")):
            method: Callable[[], Any] = getattr(module, name)
            return method
    return None


def _kept_in_module(module: nn.Module, reset: Callable[[], Any]) -> CacheForm:
    def begin(rows: int, length: int) -> Any:
        reset()
        return ()

    def step(prefix: Prefix) -> tuple[Any, Any]:
        return module(prefix.new_tokens, use_cache=True), ()

    return CacheForm(f"f(x, use_cache=True) after {reset.__name__}()", begin, step, in_module=True, undoubted=True)


def _with_positions(module: nn.Module, name: str, *, as_tensor: bool) -> CacheForm:
    def begin(rows: int, length: int) -> Any:
        set_up_caches(module, rows, length)
        return ()

    def step(prefix: Prefix) -> tuple[Any, Any]:
        position: Any = prefix.position
        if as_tensor:
            position = torch.arange(prefix.position, prefix.tokens.shape[1], device=prefix.tokens.device)
        return module(prefix.new_tokens, **{name: position}), ()

    shown = f"{name}=positions" if as_tensor else f"{name}=i"
    return CacheForm(f"f(x, {shown})", begin, step, in_module=True, undoubted=True)


def _returned(
    module: nn.Module,
    names: tuple[str, ...],
    flag: str | None,
    *,
    whole_prefix: bool = False,
    position: str | None = None,
) -> CacheForm:
    """Caches that a call returns behind the logits; some packages take the whole prefix and compute its last token.

    `position` is a parameter for the position of the first token, if the call needs one beside the caches.
    """

    def begin(rows: int, length: int) -> Any:
        return None

    def step(prefix: Prefix) -> tuple[Any, Any]:
        tokens = prefix.tokens if whole_prefix else prefix.new_tokens
        options: dict[str, Any] = {}
        if prefix.state is not None:
            options = dict(zip(names, prefix.state))
        if flag is not None:
            options[flag] = True
        if position is not None:
            options[position] = prefix.position
        return _take_caches(module(tokens, **options), names)

    caches = ", ".join(f"{name}=cache" for name in names)
    flags = f", {flag}=True" if flag else ""
    if position is not None:
        flags = f"{flags}, {position}=i"
    name = f"f({'prefix' if whole_prefix else 'x'}, {caches}{flags})"
    undoubted = all(UNDOUBTED.match(cache) for cache in names)
    return CacheForm(name, begin, step, in_module=False, takes_prefix=whole_prefix, undoubted=undoubted)


def _take_caches(result: Any, names: tuple[str, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The logits and the caches in the result of a call: by their names in a record, else by their order."""
    if isinstance(result, Mapping):
        named = dict(result)
    elif is_dataclass(result) or hasattr(result, "_fields"):
        named = {name: getattr(result, name, None) for name in (*names, "logits")}
    else:
        named = {}
    if all(named.get(name) is not None for name in names):
        logits = named.get("logits")
        if logits is None:
            # the first of a tuple, else the first tensor of the shape of logits
            logits = result[0] if isinstance(result, tuple) else result
        return logits, tuple(named[name] for name in names)
    if not isinstance(result, tuple | list) or len(result) <= len(names):
        raise ValueError(f"a call gives no {' and '.join(names)} behind the logits")
    if len(names) == 1 and len(result) > 2:
        # all that is behind the logits is one cache
        return result[0], (tuple(result[1:]),)
    return result[0], tuple(result[1 : 1 + len(names)])


def _by_method(module: nn.Module, name: str, *, as_vector: bool) -> CacheForm:
    """A method of its own for steps, which gives the logits and the next state."""
    initial = next((getattr(module, method) for method in dir(type(module)) if INITIAL.fullmatch(method)), None)

    def begin(rows: int, length: int) -> Any:
        if initial is None:
            return None
        parameters = inspect.signature(initial).parameters.values()
        required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
        return initial(*(rows, length)[: len(required)])

    def step(prefix: Prefix) -> tuple[Any, Any]:
        tokens = prefix.new_tokens
        if as_vector:
            if prefix.new != 1:
                raise ValueError("a step takes one token of each row")
            tokens = tokens[:, 0]
        logits, state = getattr(module, name)(tokens, prefix.state)
        return logits, state

    shown = "x[:, i]" if as_vector else "x"
    return CacheForm(f"{name}({shown}, state)", begin, step, in_module=False, undoubted=True)
