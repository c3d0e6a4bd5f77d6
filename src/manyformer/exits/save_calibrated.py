"""A model with its certified threshold, as a folder of its own."""

import json
import shutil
from pathlib import Path

from manyformer.exits.calibration import ThresholdCalibration
from manyformer.models import Model
from manyformer.models.model_files import replace_folder, write_parts


def save_calibrated(model: Model, found: ThresholdCalibration, source: Path, folder: Path) -> None:
    """Write `folder`: the model of the folder `source` at the certified threshold, its tokenizers, and the certificate.

    It is there as a whole or not at all.
    """
    import tempfile

    folder.parent.mkdir(parents=True, exist_ok=True)
    spec = model.spec
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.spec = spec._replace(keywords={**spec.keywords, "threshold": found.threshold})
        write_parts(model, fresh)
        for file in source.glob("tokenizer*.json"):
            shutil.copy2(file, fresh / file.name)
        (fresh / "calibration.json").write_text(json.dumps(found.as_json(), indent=2) + "\n", encoding="utf-8")
        replace_folder(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    finally:
        model.spec = spec
