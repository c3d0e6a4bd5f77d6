"""The merged run file that reproduces a run, and the differences between two runs."""

import json
from typing import Any

from manyformer.config.run import UNION_TAGS, RunConfig
from manyformer.config.training_sections import NoamSchedule
from manyformer.config.yaml_scalars import dump_yaml

_FREE = {"activation_checkpointing", "device", "devices", "limits", "log", "out", "process_timeout", "save", "strategy"}
FREE_ON_RESUME = frozenset(
    _FREE
    | {
        "batch.ahead",
        "evaluate.batches",
        "evaluate.every",
        "evaluate.patience",
        "evaluate.target",
        "import",
        "trackers",
    }
)
"""Settings that may change when an interrupted run is resumed: they decide when the run ends, what is saved and logged,
and on which devices it is computed, but not what the model learns."""


def dump_run(run: RunConfig) -> str:
    """The run as YAML with all defaults, so that it reads back equal even if a default changes."""
    return dump_yaml(run.model_dump(mode="json", by_alias=True))


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The settings that differ between two runs, except those in FREE_ON_RESUME, as `optim.lr: 0.1, now 0.2`.

    If the member of a union has changed (another optimizer), only that is reported.
    """
    old_settings = _flatten(old)
    new_settings = _flatten(new)
    for section, (tag, _) in UNION_TAGS.items():
        if old_settings[f"{section}.{tag}"] != new_settings[f"{section}.{tag}"]:
            old_settings, new_settings = (
                _without_members(settings, section, tag) for settings in (old_settings, new_settings)
            )
    return [
        f"{name}: {old_settings.get(name, 'not given')}, now {new_settings.get(name, 'not given')}"
        for name in dict.fromkeys([*old_settings, *new_settings])
        if old_settings.get(name) != new_settings.get(name)
        and FREE_ON_RESUME.isdisjoint({name, name.partition(".")[0]})
    ]


def _without_members(settings: dict[str, str], section: str, tag: str) -> dict[str, str]:
    tag_setting = f"{section}.{tag}"
    return {name: text for name, text in settings.items() if name == tag_setting or not name.startswith(f"{section}.")}


def _flatten(run: RunConfig) -> dict[str, str]:
    flat: dict[str, Any] = {}
    schedule = run.schedule
    if isinstance(schedule, NoamSchedule):
        # The warm-up scales the whole schedule; an unset one follows from the limits, which may change.
        run = run.model_copy(update={"schedule": schedule.model_copy(update={"warmup": run.warmup})})
    for name, part in run.model_dump(mode="json", by_alias=True).items():
        if isinstance(part, dict):
            flat |= {f"{name}.{key}": value for key, value in part.items()}
        else:
            flat[name] = part
    return {name: json.dumps(value, sort_keys=True, ensure_ascii=False) for name, value in flat.items()}
