"""Hashes of trainings: two with the same hash have the same result."""

import hashlib
from typing import Any

from manyformer.config import EncodedTextData, RunConfig
from manyformer.config.comparison import ComparisonCase
from manyformer.files.json_text import json_text

IGNORED_SECTIONS = {"out", "log", "save", "trackers", "device", "imports", "process_timeout"}
"""Sections of a run that do not affect its measurement."""


def run_settings(run: RunConfig) -> dict[str, Any]:
    """The settings that affect a measurement, without those that have their defaults.

    A setting that is added later, whose default changes nothing, leaves measurements valid."""
    kinds = {"data": run.data.model_dump(include={"kind", "rule"})}
    kinds |= {"optim": {"name": run.optim.name}, "schedule": {"name": run.schedule.name}}
    settings = run.model_dump(mode="json", exclude=IGNORED_SECTIONS, exclude_defaults=True)
    return settings | {section: settings.get(section, {}) | kind for section, kind in kinds.items()}


def training_hash(case: ComparisonCase, run: RunConfig) -> str:
    """A hash of the run with the name of the case whose weights it starts from, instead of that case's folder."""
    origin = case.init_from_case
    return content_hash(run_settings(run if origin is None else with_source(run, run.init_from, origin)))


def with_source(run: RunConfig, old: str | None, new: str) -> RunConfig:
    """The run with `new` as `init_from`, and as `data.tokenizer_of` where that was `old` as well."""
    data = run.data
    if isinstance(data, EncodedTextData) and data.tokenizer_of == old:
        data = data.model_copy(update={"tokenizer_of": new})
    return run.model_copy(update={"init_from": new, "data": data})


def content_hash(content: Any) -> str:
    """24 hexadecimal digits that stand for content which JSON can express."""
    return hashlib.sha256(json_text(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:24]
