"""The contracts of every recipe on the device, with short rows: what `manyformer check` tests."""

from functools import partial

import manyformer as mf
from gpu_parts.outcome import TINY_RECIPES, Item, Outcome, Setting, judged
from manyformer.analysis.own_models import build_tiny

LENGTH = 32


def items(setting: Setting) -> dict[str, Item]:
    """Each recipe."""
    names = TINY_RECIPES[:1] if setting.tiny else sorted(mf.recipes())
    return {name: partial(check, setting, name) for name in names}


def check(setting: Setting, recipe: str) -> Outcome:
    """All contracts but that of compilation, which is a part of its own."""
    length = min(LENGTH, build_tiny(recipe, {}, 0).max_length or LENGTH)
    rows = mf.check(recipe, device=str(setting.device), length=length, skip=("compile",)).rows
    verdicts = [row.verdict for row in rows]
    misses = [f"{row.contract}: {row.sentence}" for row in rows if row.verdict == "failed"]
    numbers = {verdict: float(verdicts.count(verdict)) for verdict in dict.fromkeys(verdicts)}
    return judged(f"{verdicts.count('passed')} of {len(rows)} contracts passed", misses, numbers)
