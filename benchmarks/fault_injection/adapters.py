"""Adapters of peft whose files are damaged, or whose settings say what is not so or what no reader may ignore."""

import time
from typing import Any

from fault_injection import scenarios
from fault_injection.damage import DAMAGES
from fault_injection.hostile_fields import VALUES, Attack, replacement
from fault_injection.hostile_files import CHANGES, LINKS
from fault_injection.outcomes import NotRun, Trial, judge
from fault_injection.planted_code import change_json
from fault_injection.scenarios import Command
from fault_injection.workshop import Workshop, results_of

FAMILY = "adapters"
COMMAND: Command = ("import", "adapter", "--base", "llama", "--out", "merged", "--json")
MERGED = "merged/model.safetensors"
CONFIG, WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"

MEANINGFUL: dict[str, tuple[Any, ...]] = {
    "fan_in_fan_out": (True,),
    "use_rslora": (True,),
    "use_dora": (True,),
    "lora_alpha": (1, 0.5, 0),
    "alpha_pattern": ({"q_proj": 3},),
    "rank_pattern": ({"q_proj": 2},),
    "init_lora_weights": ("pissa", "olora", "pissa_niter_4", "corda", "loftq"),
    "lora_bias": (True,),
    "layer_replication": ([[0, 1]],),
    "trainable_token_indices": ([1, 2],),
    "target_parameters": (["mlp.gate_proj.weight"],),
    "modules_to_save": (["embed_tokens"], ["lm_head"]),
    "peft_type": ("IA3", "LOHA", "PROMPT_TUNING", "OFT"),
}
"""Settings with which peft computes something else, or reads another file: the same result would be a fault."""
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "target_parameters": ([],),
    "lora_dropout": (0.5,),
    "inference_mode": (False,),
    "revision": ("main",),
    "task_type": (None,),
    "init_lora_weights": (False, "gaussian", "eva"),
    # the model has no biases
    "bias": ("all", "lora_only"),
}
"""Settings with which peft computes the same."""


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """One change of an adapter; settings of known effect, other values, damage and lies take turns."""
    chance = workshop.chance(FAMILY, number)
    reference = workshop.reference(scenarios.FOREIGN, (COMMAND,), finished=False)[0]
    workshop.set_up(scenarios.FOREIGN, finished=False)
    here, turn = workshop.here, number // 4
    expected: bool | None = None
    file = CONFIG
    if number % 4 < 2:
        table = (MEANINGFUL, WITHOUT_EFFECT)[number % 4]
        pairs = [(name, value) for name, values in table.items() for value in values]
        name, value = pairs[turn % len(pairs)]
        change_json(here / CONFIG, **{name: value})
        deed, expected = f"{name}: {value!r}", number % 4 == 1
    elif number % 4 == 2:
        fields = (
            "peft_type",
            "r",
            "lora_alpha",
            "target_modules",
            "bias",
            "use_dora",
            "fan_in_fan_out",
            "alpha_pattern",
        )
        places = [(field,) for field in (*fields, "use_rslora", "modules_to_save", "rank_pattern")]
        attack: Attack = replacement(
            here.joinpath(CONFIG).relative_to(here), chance.choice(places), chance.choice(VALUES)
        )
        attack.carry_out(here)
        deed = attack.deed
    else:
        changes = {**{damage.__name__: damage for damage in DAMAGES}, **LINKS, **CHANGES[".safetensors"]}
        kind = sorted(changes)[turn % len(changes)]
        file = WEIGHTS if kind in CHANGES[".safetensors"] else chance.choice((CONFIG, WEIGHTS))
        change = changes[kind]
        deed = f"{kind.replace('_', ' ')}: {file}"
        if kind in CHANGES[".safetensors"] or kind in LINKS:
            change(here / file)  # type: ignore[call-arg]
        else:
            change(here / file, chance)  # type: ignore[call-arg]
    began = time.monotonic()
    result = workshop.run(COMMAND)
    same: bool | None = None
    if result.code == 0 and expected is not None:
        is_equal = results_of(here).get(MERGED) == reference.results[MERGED]
        same = is_equal == expected
    names = {file.rpartition("/")[2], "adapter", *deed.split(":")[:1]}
    outcome, detail = judge(result, names, same=same)
    if expected and result.code == 2:
        outcome, detail = "unnamed", f"refused, though peft computes the same: {detail}"
    return Trial(FAMILY, number, deed, outcome, str(result), detail, time.monotonic() - began)
