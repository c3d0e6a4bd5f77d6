"""All settings: their names, the nearest name for one that does not exist, and descriptions for help and editors."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from manyformer.base.errors import format_value
from manyformer.base.keyword_checks import describe_keywords, type_text
from manyformer.config.data_sections import DATA_SECTIONS, DataSection, select_section
from manyformer.config.run import UNION_TAGS, RunConfig
from manyformer.config.section import ConfigSection


def _members(annotation: Any) -> tuple[type[ConfigSection], ...]:
    candidates = get_args(annotation) or (annotation,)
    return tuple(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, ConfigSection))


_MEMBERS = {name: members for name, field in RunConfig.model_fields.items() if (members := _members(field.annotation))}

SECTIONS = frozenset(_MEMBERS)
"""The names of the settings of a run that are groups of settings themselves."""


def section_members(section: str) -> tuple[type[ConfigSection], ...]:
    """The classes of a section: one, or all members of a union; of `data`, all kinds registered so far."""
    if section == "data":
        return tuple(DATA_SECTIONS.values())
    return _MEMBERS[section]


RUN_SETTINGS = tuple(field.alias or name for name, field in RunConfig.model_fields.items())
"""The settings of a run under their names in run files; `import` is a word of Python and has another name there."""

# The lowest similarity at which a name is suggested for another.
_MIN_SIMILARITY = 0.65
# Names less similar than this are treated as having nothing in common.
_MIN_PART = 0.5


_SYNONYMS = """
    amp=precision batch_size=batch.tokens block_size=data.length context=data.length context_length=data.length
    d_ff=model.ff_dim d_model=model.dim dataloader_num_workers=batch.ahead dataset=data.path dtype=precision
    early_stopping=evaluate.patience
    embed_dim=model.dim grad_clip=optim.max_grad_norm gradient_accumulation_steps=batch.accumulate
    gradient_checkpointing=activation_checkpointing hidden_size=model.dim intermediate_size=model.ff_dim
    iterations=limits.steps layers=model.depth learning_rate=optim.lr max_len=data.length max_length=data.length
    max_steps=limits.steps n_embd=model.dim n_head=model.heads n_heads=model.heads n_layer=model.depth
    n_layers=model.depth nhead=model.heads num_epochs=limits.epochs num_heads=model.heads num_layers=model.depth
    num_workers=batch.ahead optimiser=optim optimizer=optim out_dir=out output_dir=out
    prefetch=batch.ahead prefetch_factor=batch.ahead random_seed=seed scheduler=schedule seq_len=data.length
    vocab_size=data.vocab warmup_steps=schedule.warmup wd=optim.weight_decay
"""
SYNONYMS = dict(pair.split("=") for pair in _SYNONYMS.split())
"""Settings by their names in other programs."""


def tag_of(member: type[ConfigSection], tag: str) -> str:
    """The tag value that selects this member of a union: 'adamw' for AdamWConfig."""
    return str(member.model_fields[tag].default)


def selected_member(section: str, data: dict[str, Any]) -> type[ConfigSection] | None:
    """The member of a section that the settings select, None if it does not exist."""
    members = section_members(section)
    if section not in UNION_TAGS:
        return members[0]
    tag, default = UNION_TAGS[section]
    section_data = data.get(section)
    if isinstance(section_data, dict):
        # a section without its tag means the default member
        tag_value = section_data.get(tag, default)
    else:
        tag_value = default
    if section == "data":
        return select_section({tag: tag_value, **(section_data if isinstance(section_data, dict) else {})})
    return next((member for member in members if tag_of(member, tag) == tag_value), None)


def valid_settings(data: dict[str, Any], signature: inspect.Signature | None) -> list[str]:
    """The dotted names of all settings valid with the union members selected in `data`, with model keywords."""
    names = []
    for name in RUN_SETTINGS:
        if name == "model":
            names += [f"model.{keyword}" for keyword in signature.parameters] if signature else []
        elif name in SECTIONS:
            member = selected_member(name, data)
            names += [f"{name}.{field}" for field in member.model_fields] if member else []
        else:
            names.append(name)
    return names


def variant_of_setting(data: dict[str, Any], name: str) -> str:
    """`is a setting of data.rule=hops, not of markov` for a data setting that only other variants of its kind have.

    An empty text for any other setting."""
    section = selected_member("data", data)
    if (
        section is None
        or not issubclass(section, DataSection)
        or section.variant_setting is None
        or name in section.model_fields
    ):
        return ""
    tag = section.variant_setting
    variants = section.variants
    owners = [variant for variant, member in variants.items() if name in member.model_fields]
    if owners:
        return f"is a setting of data.{tag}={' and '.join(owners)}, not of {tag_of(section, tag)}"
    return ""


def leaf(name: str) -> str:
    """The last part of a dotted name."""
    return name.rpartition(".")[2]


def suggest_setting(unknown_name: str, valid_names: Sequence[str]) -> str:
    """The end of an error message about an unknown setting: similar names, or the valid names."""
    section, _, setting = unknown_name.partition(".")
    if unknown_name in valid_names and setting:
        # as on the command line, in a file
        return f"a file has sections: write {section}: {{{setting}: VALUE}}"
    suggestions = _similar_names(unknown_name, valid_names)
    if suggestions:
        return f"did you mean {' or '.join(suggestions[:3])}?"
    section = unknown_name.rpartition(".")[0]
    section_names = [leaf(name) for name in valid_names if section and name.rpartition(".")[0] == section]
    if section_names:
        return f"known in {section}: {', '.join(sorted(section_names))}"
    return f"known: {', '.join(dict.fromkeys(name.partition('.')[0] for name in [*valid_names, 'model']))}"


def _similar_names(unknown_name: str, valid_names: Sequence[str]) -> list[str]:
    synonym = SYNONYMS.get(leaf(unknown_name))
    # a name of another program means exactly one setting
    if synonym in valid_names or synonym in SECTIONS:
        return [str(synonym)]
    # the right name in the wrong section
    same_leaf = [
        name for name in valid_names if leaf(name) == leaf(unknown_name) or unknown_name.startswith(f"{name}.")
    ]
    if same_leaf:
        # what other programs have, too, such as limits.steps, is meant more often than a step of one part of a run
        return [name for name in same_leaf if name in SYNONYMS.values()] or same_leaf
    scores = {name: _path_similarity(unknown_name, name) for name in dict.fromkeys([*valid_names, *SECTIONS, "model"])}
    scores |= {
        name: _similarity(leaf(unknown_name), foreign_name)
        for foreign_name, name in SYNONYMS.items()
        if _similarity(leaf(unknown_name), foreign_name) > 0.8
    }
    # names that are about as near as the nearest one
    best = max(scores.values(), default=0.0)
    similar = [
        name
        for name in scores
        if scores[name] >= max(_MIN_SIMILARITY, best - 0.05) and (name in valid_names or "." not in name)
    ]
    return sorted(similar, key=lambda name: -scores[name])


def _path_similarity(unknown_name: str, name: str) -> float:
    """Similarity of the last parts of two names, lower in different sections unless one is misspelled."""
    unknown_leaf = leaf(unknown_name)
    valid_leaf = leaf(name)
    similarity = _similarity(unknown_leaf, valid_leaf)
    if len(unknown_leaf) > 3 and unknown_leaf in valid_leaf:
        similarity = max(similarity, _MIN_SIMILARITY + 0.1)  # decay, of weight_decay
    section = unknown_name.rpartition(".")[0]
    name_section = name.rpartition(".")[0]
    if section == name_section:
        return similarity
    return max(similarity - 0.1, min(similarity, _similarity(section, name_section)))


def _similarity(first: str, second: str) -> float:
    matcher = difflib.SequenceMatcher(None, first, second)
    # bounds that cost little
    if matcher.real_quick_ratio() < _MIN_PART or matcher.quick_ratio() < _MIN_PART:
        return 0.0
    return matcher.ratio()


class SettingHelp(NamedTuple):
    """One line of help: the dotted key, its type in words, its default as YAML, and its description."""

    key: str
    type: str
    default: str
    doc: str


def describe_settings(run: RunConfig | None = None, signature: inspect.Signature | None = None) -> list[SettingHelp]:
    """Describe every setting of a run with this run's values as defaults, and the keywords of its recipe's signature.

    Without a run, the defaults of RunConfig are shown.
    """
    values = run if run is not None else RunConfig(recipe="?")
    rows: list[SettingHelp] = []
    for name, field in RunConfig.model_fields.items():
        value = getattr(values, name)
        if name == "model":
            rows += _keyword_rows(value, signature)
        elif isinstance(value, ConfigSection):
            rows += [
                _setting_row(f"{name}.{key}", inner_field, getattr(value, key))
                for key, inner_field in type(value).model_fields.items()
            ]
        else:
            rows.append(
                _setting_row(field.alias or name, field, "required" if run is None and field.is_required() else value)
            )
    return rows


def json_schema() -> dict[str, Any]:
    """A JSON Schema of run files, for completion and checking in editors."""
    schema = RunConfig.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"] = {
        "extends": {"type": "string", "description": "A shipped run or a file whose settings these are laid over."},
        **schema["properties"],
    }
    # a recipe may come from the file that is extended, or with the weights
    schema["anyOf"] = [{"required": [name]} for name in [*schema.pop("required"), "extends", "init_from"]]
    return schema


def _setting_row(key: str, field: FieldInfo, value: Any) -> SettingHelp:
    section, _, name = key.partition(".")
    type_description = type_text(field.annotation, tuple(field.metadata))
    if section in UNION_TAGS and name == UNION_TAGS[section][0]:
        type_description = f"one of {', '.join(tag_of(member, name) for member in section_members(section))}"
    elif section == "data" and (variants := _variants(name)):
        type_description = f"one of {', '.join(variants)}"
    return SettingHelp(key, type_description, _default_text(value), " ".join(str(field.description or "").split()))


def _variants(setting: str) -> dict[str, type[DataSection]]:
    """The variants that a data setting selects; none if it selects none."""
    kinds = DATA_SECTIONS.values()
    return next((section.variants for section in kinds if section.variant_setting == setting), {})


def _keyword_rows(values: Mapping[str, Any], signature: inspect.Signature | None) -> list[SettingHelp]:
    rows = []
    for keyword in describe_keywords(signature) if signature else []:
        value = values.get(keyword.name, keyword.default)
        default = "required"
        if value is not inspect.Parameter.empty:
            default = _default_text(value)
        rows.append(SettingHelp(f"model.{keyword.name}", keyword.type, default, keyword.meaning))
    return rows


def _default_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return format_value(value)
