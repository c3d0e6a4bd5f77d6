"""The names of all settings, and the nearest right one to a name that is none of them."""

import difflib
import inspect
from collections.abc import Sequence
from typing import Any, get_args

from manyformer.config.run import TAGS, RunConfig
from manyformer.config.section import ConfigSection


def _members(annotation: Any) -> tuple[type[ConfigSection], ...]:
    candidates = get_args(annotation) or (annotation,)
    return tuple(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, ConfigSection))


# The sections of a run and their members: one, or as many as the union has.
SECTIONS: dict[str, tuple[type[ConfigSection], ...]] = {
    name: members for name, field in RunConfig.model_fields.items() if (members := _members(field.annotation))
}

# How alike two names must be for one to be suggested for the other.
_NEAR = 0.65

# What other programs call our settings.
SYNONYMS = {
    "amp": "precision",
    "batch_size": "batch.tokens",
    "block_size": "data.length",
    "context": "data.length",
    "context_length": "data.length",
    "d_ff": "model.hidden",
    "d_model": "model.dim",
    "dataset": "data.path",
    "dtype": "precision",
    "early_stopping": "evaluate.patience",
    "embed_dim": "model.dim",
    "grad_clip": "optim.clip",
    "gradient_accumulation_steps": "batch.accumulate",
    "gradient_checkpointing": "remat",
    "hidden_size": "model.dim",
    "intermediate_size": "model.hidden",
    "iterations": "limits.steps",
    "label_smoothing": "loss.smoothing",
    "layers": "model.depth",
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip",
    "max_len": "data.length",
    "max_length": "data.length",
    "max_steps": "limits.steps",
    "n_embd": "model.dim",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "n_layer": "model.depth",
    "n_layers": "model.depth",
    "nhead": "model.heads",
    "num_epochs": "limits.epochs",
    "num_heads": "model.heads",
    "num_layers": "model.depth",
    "optimiser": "optim",
    "optimizer": "optim",
    "out_dir": "out",
    "output_dir": "out",
    "random_seed": "seed",
    "scheduler": "schedule",
    "seq_len": "data.length",
    "vocab_size": "data.vocab",
    "warmup_steps": "schedule.warmup",
    "wd": "optim.weight_decay",
}


def tag_of(member: type[ConfigSection], tag: str) -> str:
    """The word that chooses this member of a union: 'adamw' for AdamW."""
    return str(member.model_fields[tag].default)


def chosen(section: str, data: dict[str, Any]) -> type[ConfigSection] | None:
    """The member of a section that settings choose, None where they name one that does not exist."""
    members = SECTIONS[section]
    if section not in TAGS:
        return members[0]
    tag, usual = TAGS[section]
    given = data.get(section)
    word = given.get(tag, usual) if isinstance(given, dict) else usual
    return next((member for member in members if tag_of(member, tag) == word), None)


def known_settings(data: dict[str, Any], signature: inspect.Signature | None) -> list[str]:
    """The dotted names of every setting that can be given where these are chosen, model keywords included."""
    names = []
    for name in RunConfig.model_fields:
        if name == "model":
            names += [f"model.{keyword}" for keyword in signature.parameters] if signature else []
        elif name in SECTIONS:
            member = chosen(name, data)
            names += [f"{name}.{field}" for field in member.model_fields] if member else []
        else:
            names.append(name)
    return names


def leaf(name: str) -> str:
    """The last part of a dotted name."""
    return name.rpartition(".")[2]


def suggest(wrong: str, known: Sequence[str]) -> str:
    """The end of a sentence about an unknown setting: the nearest ones by their full paths, or those at its place."""
    near = _near(wrong, known)
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    section = wrong.rpartition(".")[0]
    there = [leaf(name) for name in known if name.rpartition(".")[0] == section] if section else []
    if there:
        return f"known in {section}: {', '.join(sorted(there))}"
    return f"known: {', '.join(dict.fromkeys(name.partition('.')[0] for name in [*known, 'model']))}"


def _near(wrong: str, known: Sequence[str]) -> list[str]:
    synonym = SYNONYMS.get(leaf(wrong))
    if synonym in known or synonym in SECTIONS:
        return [str(synonym)]
    same = [name for name in known if leaf(name) == leaf(wrong) or wrong.startswith(f"{name}.")]
    if same:
        return same
    scores = {name: _likeness(wrong, name) for name in dict.fromkeys([*known, *SECTIONS, "model"])}
    scores |= {name: _alike(leaf(wrong), word) for word, name in SYNONYMS.items() if _alike(leaf(wrong), word) > 0.8}
    best = max(scores.values(), default=0.0)
    near = [name for name in scores if scores[name] >= max(_NEAR, best - 0.05) and (name in known or "." not in name)]
    return sorted(near, key=lambda name: -scores[name])


def _likeness(wrong: str, name: str) -> float:
    """How near a name is by its last part, which counts less in another section unless that is misspelt too."""
    last, word = leaf(wrong), leaf(name)
    alike = _alike(last, word)
    if len(last) > 3 and last in word:
        alike = max(alike, _NEAR + 0.1)  # decay, of weight_decay
    section, home = wrong.rpartition(".")[0], name.rpartition(".")[0]
    return alike if section == home else max(alike - 0.1, min(alike, _alike(section, home)))


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
