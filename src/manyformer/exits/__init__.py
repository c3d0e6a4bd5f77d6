"""Models that tokens leave early, at work: thresholds swept, and calibrated so that a guarantee holds."""

from manyformer.exits.calibrate import Calibration, calibrate
from manyformer.exits.material import Material, material
from manyformer.exits.sweep import Point, sweep
from manyformer.exits.writing import Task, Written, depths

__all__ = ["Calibration", "Material", "Point", "Task", "Written", "calibrate", "depths", "material", "sweep"]
