"""The merged run file that reproduces a run, and what differs between two runs."""

import json
from typing import Any

from manyformer.config.run import TAGS, RunConfig
from manyformer.config.training_sections import NoamSchedule
from manyformer.config.yaml_scalars import dump

FREE_ON_RESUME = frozenset(
    {
        "device",
        "devices",
        "evaluate.batches",
        "evaluate.every",
        "evaluate.patience",
        "limits",
        "log",
        "out",
        "remat",
        "save",
        "strategy",
        "track",
    }
)
"""Settings that may change between an interruption and its continuation: they decide when a run ends, what is kept and
shown, and where and on how many devices it is computed, but not what is learned from what, how."""


def dump_run(run: RunConfig) -> str:
    """The whole run as YAML, defaults included, so that it reads back equal even when a default changes."""
    return dump(run.model_dump(mode="json"))


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """The settings of `a` that are others in `b`, but for those of FREE_ON_RESUME, as `optim.lr: 0.1, now 0.2`.

    Where the member of a union changed (another optimiser) only that is told.
    """
    before, after = _flat(a), _flat(b)
    for section, (tag, _) in TAGS.items():
        if before[f"{section}.{tag}"] != after[f"{section}.{tag}"]:
            before, after = (_without_members(settings, section, tag) for settings in (before, after))
    names = [name for name in dict.fromkeys([*before, *after]) if not _free(name)]
    return [
        f"{name}: {before.get(name, 'not given')}, now {after.get(name, 'not given')}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _without_members(settings: dict[str, str], section: str, tag: str) -> dict[str, str]:
    kept = f"{section}.{tag}"
    return {name: text for name, text in settings.items() if name == kept or not name.startswith(f"{section}.")}


def _free(name: str) -> bool:
    return name in FREE_ON_RESUME or name.partition(".")[0] in FREE_ON_RESUME


def _flat(run: RunConfig) -> dict[str, str]:
    flat: dict[str, Any] = {}
    schedule = run.schedule
    if isinstance(schedule, NoamSchedule):
        # Its warm-up scales the whole schedule, and where it is left open it follows from the limits, which are free.
        run = run.model_copy(update={"schedule": schedule.model_copy(update={"warmup": run.warmup})})
    for name, part in run.model_dump(mode="json").items():
        if isinstance(part, dict):
            flat |= {f"{name}.{key}": value for key, value in part.items()}
        else:
            flat[name] = part
    return {name: json.dumps(value, sort_keys=True, ensure_ascii=False) for name, value in flat.items()}
