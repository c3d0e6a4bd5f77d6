"""Plans of trainings: operations, memory, time, data, checkpoints and price of any recipe on named hardware.

`plan_training("transformer-lm", PlanRequest(...))` returns a `PlannedTraining`; nothing is trained. Names are imported
when they are first used, since what is known of accelerators needs no torch."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.planning.accelerators import parse_quantity
    from manyformer.analysis.planning.hardware import DeviceSet, calibrate, parse_devices
    from manyformer.analysis.planning.rehearsed_step import RehearsedCost, step_cost
    from manyformer.analysis.planning.training_plan import PlannedTraining, PlanRequest, keywords_of_size, plan_training

_MODULES = {
    "DeviceSet": "manyformer.analysis.planning.hardware",
    "PlanRequest": "manyformer.analysis.planning.training_plan",
    "PlannedTraining": "manyformer.analysis.planning.training_plan",
    "RehearsedCost": "manyformer.analysis.planning.rehearsed_step",
    "calibrate": "manyformer.analysis.planning.hardware",
    "keywords_of_size": "manyformer.analysis.planning.training_plan",
    "parse_devices": "manyformer.analysis.planning.hardware",
    "parse_quantity": "manyformer.analysis.planning.accelerators",
    "plan_training": "manyformer.analysis.planning.training_plan",
    "step_cost": "manyformer.analysis.planning.rehearsed_step",
}

__all__ = [
    "DeviceSet",
    "PlanRequest",
    "PlannedTraining",
    "RehearsedCost",
    "calibrate",
    "keywords_of_size",
    "parse_devices",
    "parse_quantity",
    "plan_training",
    "step_cost",
]

_offer_names(__name__, _MODULES)
