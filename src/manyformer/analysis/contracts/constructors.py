"""Small models from a class or factory alone: sizes of its parameters are filled by their names.

Released models call the same dozen sizes by a few names each. A value that no name gives is asked for.
"""

import ast
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from manyformer.base.errors import UserError, suggest_names

NAMES = {
    "vocab": (
        "vocab_size",
        "num_tokens",
        "n_vocab",
        "vocab",
        "n_tokens",
        "ntoken",
        "vocabulary_size",
        "padded_vocab_size",
        "num_embeddings",
    ),
    "width": (
        "n_embd",
        "dim",
        "d_model",
        "emb_dim",
        "model_dim",
        "n_embed",
        "embed_dim",
        "embedding_dim",
        "hidden_size",
        "hidden_dim",
        "emb_size",
        "embed_size",
        "d_embed",
        "width",
    ),
    "layers": ("n_layer", "n_layers", "num_layers", "depth", "layers", "num_hidden_layers", "n_blocks", "num_blocks"),
    "heads": ("n_head", "n_heads", "num_heads", "heads", "nhead", "num_attention_heads"),
    "kv_heads": (
        "n_kv_head",
        "num_kv_heads",
        "kv_heads",
        "n_kv_heads",
        "n_kv_groups",
        "n_query_groups",
        "num_key_value_heads",
    ),
    "head_width": ("dim_head", "head_dim", "d_head", "head_size"),
    "length": (
        "block_size",
        "max_seq_len",
        "max_seq_length",
        "seq_len",
        "sequence_len",
        "sequence_length",
        "context_length",
        "context_size",
        "n_positions",
        "max_position_embeddings",
        "ctx_len",
        "n_ctx",
        "max_len",
        "max_length",
        "l_max",
    ),
    "inner": ("intermediate_size", "ff_dim", "d_ff", "ffn_dim", "mlp_dim", "dim_feedforward", "inner_dim", "n_inner"),
    "window": (
        "window_size",
        "window",
        "local_attn_window_size",
        "sliding_window",
        "sliding_window_size",
        "attention_window",
        "block_width",
        "chunk_size",
        "segment_len",
    ),
}
"""What released models call each size."""

SIZES = {
    "vocab": 97,
    "width": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 16,
    "length": 256,
    "inner": 128,
    "window": 16,
}
"""Small values that fit together. The vocabulary is no multiple of anything, so that padding shows."""

SIZE_OF = {name: size for size, names in NAMES.items() for name in names}

CUSTOMARY: dict[str, Any] = {
    "dropout": 0.0,
    "drop_rate": 0.0,
    "attn_dropout": 0.0,
    "ff_dropout": 0.0,
    "bias": False,
    "qkv_bias": False,
    "ff_mult": 2,
    "mlp_mult": 2,
    "mlp_ratio": 2,
    "rope_base": 10_000.0,
    "rope_theta": 10_000.0,
    "logit_softcap": 30.0,
    "qk_gain_init": 1.0,
    "tie_embeddings": True,
    "tied_embed_init_std": 0.02,
    "initializer_range": 0.02,
    "norm_eps": 1e-5,
    "num_memory_tokens": 4,
}
"""Values of other parameters, for those without a default."""

CAUSAL_NAMES = ("causal", "is_causal")
CONFIG_NAMES = ("config", "cfg", "args", "params", "hparams", "conf", "model_config", "model_args")
CONFIG_WORDS = ("config", "args", "params", "hparams", "options", "hyperparameters")

TYPE_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

UNKNOWN = inspect.Parameter.empty


@dataclass(frozen=True)
class Need:
    """One value that a constructor takes: its name, its type and its default, each `UNKNOWN` if there is none."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is UNKNOWN


@dataclass
class Filled:
    """The arguments of one call; what was filled in, and the names of what nothing gives."""

    arguments: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Built:
    """What a constructor gave, and the sentence about what was filled in, if anything was."""

    value: Any
    notes: tuple[str, ...] = ()


class ConstructorRefusal(UserError):
    """A constructor whose values do not follow from names: the message ends with a factory to write."""


def build_from_names(
    target: Callable[..., Any], given: Mapping[str, str], label: str, run: Callable[[Callable[[], Any]], Any]
) -> Built:
    """Call a class or function with the `given` values, typed by its parameters, and small sizes for the others.

    `run` calls a function of the user's code and turns what it raises into a UserError. Raises UserError.
    """
    _check_given(target, given, label)
    errors: list[UserError] = []
    tried: list[dict[str, Any]] = []
    for kinds in _choices(_needs_of_all(target)):
        filler = _Filler(given, kinds, run)
        filled = filler.fill(target)
        if filled.missing:
            raise _refusal(target, filled, label)
        # a choice that fills the same values would raise the same
        if filled.notes in tried:
            continue
        tried.append(filled.notes)
        try:
            value = run(lambda arguments=filled.arguments: _call(target, arguments))  # type: ignore[misc]
        except UserError as error:
            errors.append(error)
            continue
        return Built(value, _notes(label, filled.notes))
    # with its own defaults alone, what it raises says all
    if not tried[0]:
        raise errors[0]
    sizes = ", ".join(f"{name}={value!r}" for name, value in tried[0].items())
    raise ConstructorRefusal(
        f"{label} cannot be built with {sizes}: {errors[0]}; say what fits, as in `{next(iter(tried[0]))}=VALUE`, "
        f"or name a function that builds it:\n{_factory(target, tried[0], [])}"
    ) from errors[0]


def _call(target: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    positional = []
    keywords = dict(arguments)
    for parameter in _signature(target):
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in keywords:
            positional.append(keywords.pop(parameter.name))
    return target(*positional, **keywords)


def _notes(label: str, filled: Mapping[str, Any]) -> tuple[str, ...]:
    if not filled:
        return ()
    values = ", ".join(f"{name}={value!r}" for name, value in filled.items())
    return (f"{label} was built with {values}, by these names; say otherwise with {next(iter(filled))}=VALUE",)


def _choices(needs: Sequence[Need]) -> Iterator[frozenset[str]]:
    """The kinds of sizes to fill, one choice after the other: small windows and lengths do not fit every model."""
    everything = frozenset(SIZES)
    yield everything
    yield everything - {"window"}
    yield everything - {"window", "head_width", "kv_heads", "inner"}
    required = frozenset(SIZE_OF[need.name] for need in needs if need.required and need.name in SIZE_OF)
    yield required
    # what only larger sizes allow, with a window that fits the length
    yield required - {"length", "window"} or required


class _Filler:
    """Fills one constructor and the configurations that it takes."""

    def __init__(
        self, given: Mapping[str, str], kinds: frozenset[str], run: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self.given = given
        self.kinds = kinds
        self.run = run
        self.sizes: dict[str, int] = {}

    def fill(self, target: Callable[..., Any]) -> Filled:
        self.sizes = fitting_sizes(self._kept_sizes(_needs_of_all(target)))
        return self._fill(target, target)

    def _kept_sizes(self, needs: Sequence[Need]) -> dict[str, int]:
        """Sizes that the user gave, and defaults that are small already."""
        kept: dict[str, int] = {}
        for need in needs:
            size = SIZE_OF.get(need.name)
            if size is None:
                continue
            if need.name in self.given:
                value = typed_value(need, self.given[need.name])
            else:
                value = need.default
                if not _is_size(value) or not 0 < value <= SIZES[size]:
                    continue
            if _is_size(value):
                kept.setdefault(size, value)
        return kept

    def _fill(self, target: Callable[..., Any], owner: Callable[..., Any]) -> Filled:
        filled = Filled()
        for need in needs_of(target):
            if need.name in self.given:
                filled.arguments[need.name] = typed_value(need, self.given[need.name])
                continue
            config = config_class(need, owner)
            if config is not None and (need.required or need.default is None):
                self._fill_config(need, config, owner, filled)
                continue
            value = self._value(need)
            if value is not UNKNOWN:
                filled.arguments[need.name] = value
                filled.notes[need.name] = value
            elif need.required:
                filled.missing.append(need.name)
        # parameters beyond the named ones, as of **kwargs
        if _takes_any_keyword(target):
            for name, text in self.given.items():
                if name not in filled.arguments:
                    filled.arguments[name] = typed_value(Need(name, UNKNOWN, UNKNOWN), text)
        return filled

    def _fill_config(self, need: Need, config: Callable[..., Any], owner: Callable[..., Any], filled: Filled) -> None:
        if not isinstance(config, type):
            filled.arguments[need.name] = self._default_config(config, filled)
            return
        inner = self._fill(config, owner)
        filled.notes.update(inner.notes)
        if inner.missing:
            filled.missing += inner.missing
            return
        filled.arguments[need.name] = self.run(lambda: _call(config, inner.arguments))

    def _default_config(self, make: Callable[[], Any], filled: Filled) -> Any:
        """The configuration that `get_default_config()` gives, with its sizes set."""
        config = self.run(make)
        for name in [*vars(config)]:
            need = Need(name, UNKNOWN, vars(config)[name])
            if name in self.given:
                setattr(config, name, typed_value(need, self.given[name]))
            elif name == "model_type":
                # a named model has its own sizes, and refuses others
                config.model_type = None
            elif name in SIZE_OF and (need.default is None or self._value(need) is not UNKNOWN):
                setattr(config, name, self.sizes[SIZE_OF[name]])
                filled.notes[name] = self.sizes[SIZE_OF[name]]
        return config

    def _value(self, need: Need) -> Any:
        if need.name in CAUSAL_NAMES and (need.required or need.default is False):
            return True
        size = SIZE_OF.get(need.name)
        if size is not None and size in self.kinds:
            value = self.sizes[size]
            if need.required:
                return _in_levels(size, value) if _wants_levels(need.annotation) else value
            # a default that is small already stays; -1 means that it is to be set
            if _is_size(need.default) and (need.default > SIZES[size] or need.default <= 0):
                return value
            return UNKNOWN
        if need.required:
            return CUSTOMARY.get(need.name, UNKNOWN)
        return UNKNOWN


def fitting_sizes(kept: Mapping[str, int]) -> dict[str, int]:
    """Small sizes that fit the `kept` ones: the width is heads times their width, and so on."""
    sizes = SIZES | dict(kept)
    if "heads" not in kept and "width" in kept and "head_width" in kept:
        sizes["heads"] = max(1, sizes["width"] // sizes["head_width"])
    elif "heads" not in kept and sizes["width"] % sizes["heads"]:
        sizes["heads"] = next(heads for heads in (4, 3, 2, 1) if sizes["width"] % heads == 0)
    if "width" not in kept:
        sizes["width"] = sizes["heads"] * sizes["head_width"]
    if "head_width" not in kept:
        sizes["head_width"] = max(1, sizes["width"] // sizes["heads"])
    if "kv_heads" not in kept or sizes["heads"] % sizes["kv_heads"]:
        sizes["kv_heads"] = sizes["heads"] // 2 if sizes["heads"] % 2 == 0 else sizes["heads"]
    if "inner" not in kept:
        sizes["inner"] = 2 * sizes["width"]
    return sizes


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_levels(size: str, value: int) -> tuple[int, int]:
    """The size of a model in two levels, such as patches of tokens."""
    if size == "length":
        return value // 8, 8
    return value, value


def _wants_levels(annotation: Any) -> bool:
    """Whether a parameter is a tuple or list and cannot be a number."""
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    names = [typing.get_origin(member) or member for member in members]
    return int not in names and any(member in (tuple, list, Sequence) for member in names)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _signature(target: Callable[..., Any]) -> list[inspect.Parameter]:
    if isinstance(target, type) and vars(nn.Module)["__init__"] is target.__init__:  # type: ignore[misc]
        # which takes anything, and refuses it
        return []
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_any_keyword(target: Callable[..., Any]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _signature(target))


def needs_of(target: Callable[..., Any]) -> list[Need]:
    """The values that a class or function takes, in their order."""
    hints = _type_hints(target)
    needs = []
    for parameter in _signature(target):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = hints.get(parameter.name, parameter.annotation)
        default = parameter.default
        # a dataclass shows a placeholder in the place of what a function makes
        if is_dataclass(target) and default is not UNKNOWN and not isinstance(default, int | float | str | tuple):
            made = [item.default_factory for item in fields(target) if item.name == parameter.name]
            if made and made[0] is not MISSING:
                default = made[0]()
        needs.append(Need(parameter.name, annotation, default))
    return needs


def _needs_of_all(target: Callable[..., Any]) -> list[Need]:
    """The values that a constructor takes, and those of its configurations."""
    needs = []
    for need in needs_of(target):
        config = config_class(need, target)
        if isinstance(config, type):
            needs += needs_of(config)
        else:
            needs.append(need)
    return needs


def _type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        return typing.get_type_hints(function)
    # whatever an annotation raises, the names still say enough
    except Exception:
        return {}


def config_class(need: Need, owner: Callable[..., Any]) -> Callable[..., Any] | None:
    """The class of configurations that a parameter takes, or the function that gives the default one; None if none."""
    annotation = need.annotation
    if isinstance(annotation, str):
        annotation = getattr(sys.modules.get(owner.__module__), annotation, UNKNOWN)
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for member in members:
        if _is_config_class(member):
            found: Callable[..., Any] = member
            return found
    if need.name not in CONFIG_NAMES:
        return None
    default_config: Callable[..., Any] | None = getattr(owner, "get_default_config", None)
    if default_config is not None:
        return default_config
    if any(isinstance(member, type) and member is not UNKNOWN for member in members):
        return None
    if _subscripted(owner, need.name):
        return None
    module = sys.modules.get(owner.__module__)
    known: list[type] = [item for item in vars(module).values() if _is_config_class(item)] if module else []
    own_name = getattr(owner, "__name__", "").lower()
    # GPTConfig for GPT; else the only one
    matching = [item for item in known if item.__name__.lower().startswith(own_name)]
    for group in (matching, known):
        if len(group) == 1:
            return group[0]
    return None


def _is_config_class(value: Any) -> bool:
    if not isinstance(value, type) or value.__module__ == "builtins" or issubclass(value, nn.Module | Tensor):
        return False
    words = value.__name__.lower()
    return any(word in words for word in CONFIG_WORDS) or (is_dataclass(value) and value.__module__ != "dataclasses")


def _subscripted(owner: Callable[..., Any], name: str) -> list[str]:
    """The keys with which a class reads a dictionary of this name, as in cfg["emb_dim"]."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return []
    keys: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == name:
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(key, str):
                keys[key] = None
    return list(keys)


def typed_value(need: Need, text: str) -> Any:
    """The text of a value as the type of the parameter says, or its default. Raises UserError."""
    kinds = _value_types(need)
    if text.lower() in ("none", "null") and (not kinds or type(None) in kinds or need.default is None):
        return None
    if bool in kinds and text.lower() in ("true", "false", "yes", "no", "1", "0"):
        return text.lower() in ("true", "yes", "1")
    if str in kinds and not kinds & {int, float, bool, tuple, list}:
        return text
    # JSON writes the words of Python in small letters
    literal = {"true": "True", "false": "False"}.get(text, text)
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        value = text
    if float in kinds and _is_size(value):
        value = float(value)
    if tuple in kinds and isinstance(value, list):
        value = tuple(value)
    if kinds & {int, float, bool} and not isinstance(value, tuple(kinds - {type(None)})):
        expected = " or ".join(sorted(TYPE_WORDS.get(kind, kind.__name__) for kind in kinds if kind is not type(None)))
        raise UserError(f"{need.name}={text} must be {expected}")
    return value


def _value_types(need: Need) -> set[type]:
    """The plain types that a parameter takes; none if nothing says so."""
    if need.annotation is not UNKNOWN:
        members = typing.get_args(need.annotation) if _is_union(need.annotation) else (need.annotation,)
        kinds = {typing.get_origin(member) or member for member in members}
        if all(isinstance(kind, type) for kind in kinds):
            return kinds
    elif need.default is not UNKNOWN and need.default is not None:
        kind = type(need.default)
        # 1 for 1.0 and the other way around are common in defaults
        return {int, float} if kind is int and need.name not in SIZE_OF else {kind}
    return set()


def _check_given(target: Callable[..., Any], given: Mapping[str, str], label: str) -> None:
    """Raise UserError for a given name that neither the constructor nor its configuration has."""
    names = {need.name for need in [*needs_of(target), *_needs_of_all(target)]}
    default_config = getattr(target, "get_default_config", None)
    if default_config is not None or _takes_any_keyword(target):
        return
    for name in given:
        if name in names:
            continue
        if not names:
            raise UserError(f"{label} takes no values, so {name}={given[name]} cannot be given")
        raise UserError(f"{label} has no parameter '{name}'; {suggest_names(name, names)}")


def _refusal(target: Callable[..., Any], filled: Filled, label: str) -> ConstructorRefusal:
    """The error for values that no name gives, with a factory to write."""
    names = ", ".join(filled.missing)
    for name in filled.missing:
        keys = _subscripted(target, name)
        if keys:
            example = _factory(target, {}, [], mapping=(name, keys))
            return ConstructorRefusal(
                f"{label} reads a dictionary, '{name}', which cannot be filled; name a function that builds it:\n"
                f"{example}"
            )
    it = "it" if len(filled.missing) == 1 else "them"
    if any(need.name in filled.missing and need.name in CONFIG_NAMES for need in needs_of(target)):
        ways = "name a function that builds it"
    else:
        ways = f"give {it}, as in `{filled.missing[0]}=VALUE`, or name a function that builds it"
    example = _factory(target, filled.notes, filled.missing)
    return ConstructorRefusal(f"{label} needs {names}, which cannot be filled by name; {ways}:\n{example}")


def _factory(
    target: Callable[..., Any],
    filled: Mapping[str, Any],
    missing: Sequence[str],
    mapping: tuple[str, Sequence[str]] | None = None,
) -> str:
    """A function of a few lines that builds the model, with the class's own names."""
    own = {need.name for need in needs_of(target)}
    values = [f"{name}={value!r}" for name, value in filled.items() if name in own]
    values += [f"{name}=..." for name in missing if name in own]
    if mapping is not None:
        entries = []
        for key in mapping[1]:
            value = SIZES.get(SIZE_OF.get(key, ""), CUSTOMARY.get(key, "..."))
            entries.append(f'"{key}": {value}')
        values.append(f"{mapping[0]}={{{', '.join(entries)}}}")
    configs: list[str] = []
    for need in needs_of(target):
        config = config_class(need, target)
        if isinstance(config, type) and need.required:
            configs.append(config.__name__)
            inside = {name: value for name, value in filled.items() if name not in own}
            texts = [f"{name}={value!r}" for name, value in inside.items()]
            texts += [f"{name}=..." for name in missing if name not in own]
            values.append(f"{need.name}={config.__name__}({', '.join(texts)})")
    name = getattr(target, "__name__", "Model")
    module = target.__module__.removeprefix("checked_")
    names = ", ".join([name, *configs])
    return f"    from {module} import {names}\n    def tiny():\n        return {name}({', '.join(values)})"
