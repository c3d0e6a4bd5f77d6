"""Saving a model with its certified exit threshold as a new model folder."""

import json
from pathlib import Path

from manyformer.exits.calibration import ThresholdCalibration
from manyformer.models import Model
from manyformer.models.model_files import copy_tokenizers, replacement_folder


def save_calibrated(model: Model, calibration: ThresholdCalibration, source: Path, folder: Path) -> None:
    """Write the model of folder `source` to `folder` with the certified threshold, its tokenizers and the certificate.

    The folder is replaced atomically: it is complete or does not exist.
    """
    spec = model.spec
    try:
        with replacement_folder(folder) as draft:
            model.spec = spec._replace(keywords={**spec.keywords, "threshold": calibration.threshold})
            model.write_files(draft)
            copy_tokenizers(source, draft)
            certificate = json.dumps(calibration.as_json(), indent=2) + "\n"
            (draft / "calibration.json").write_text(certificate, encoding="utf-8")
    finally:
        model.spec = spec
