"""Plans of trainings: operations, memory, time, data, checkpoints and price of any recipe on named hardware.

`plan_training("transformer-lm", PlanRequest(...))` returns a `PlannedTraining`; nothing is trained."""

from manyformer.analysis.planning.hardware import DeviceSet, calibrate, parse_devices, parse_quantity
from manyformer.analysis.planning.rehearsed_step import RehearsedCost, step_cost
from manyformer.analysis.planning.training_plan import PlannedTraining, PlanRequest, keywords_of_size, plan_training

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
