"""Exported folders on the Hugging Face hub: their README.md, and how they get there."""

from pathlib import Path

from manyformer.errors import UserError
from manyformer.files.verified_folder import MARK
from manyformer.interop.auto_classes import AutoClass
from manyformer.libraries.library_calls import RefusedByLibrary, upload_folder
from manyformer.models import Model
from manyformer.recipes import get_recipe
from manyformer.version import VERSION

MESSAGE = "Export by manyformer"


def push_folder(folder: str | Path, name: str) -> str:
    """Upload a folder to the hub as the model `name`, private if it is new, with the user's own login.

    Returns the address. Raises UserError without the package that uploads, and where the hub does not take it."""
    try:
        return upload_folder(Path(folder), name, MESSAGE, leave_out=[MARK])
    except ImportError:
        raise UserError("--push needs the package huggingface_hub: pip install 'manyformer[hf]'") from None
    except RefusedByLibrary as error:
        problem = f"{folder} is written, but it could not be pushed to {name} on the hub"
        raise UserError(f"{problem}: {error}; the same command tries it again") from None


def hub_card(model: Model, kind: AutoClass, run_card: str | None, *, is_native: bool) -> str:
    """The card: the hub's fields, how the model is loaded, and `run_card`, that of a trained model with its scores.

    Without a `run_card` it has the recipe, its paper and the keywords."""
    options = "" if is_native else ", trust_remote_code=True"
    requirement = "It is loaded by the package manyformer (`pip install 'manyformer[hf]'`).\n\n"
    if is_native:
        requirement = ""
    return f"""---
library_name: transformers
pipeline_tag: {kind.pipeline}
tags:
- manyformer
- {model.spec.recipe}
---

{run_card or _recipe_card(model)}
## With transformers

{requirement}```python
from transformers import {kind.auto_class}

model = {kind.auto_class}.from_pretrained("this folder"{options})
```

Exported by manyformer {VERSION}.
"""


def _recipe_card(model: Model) -> str:
    """The recipe of a model that no run of this library trained."""
    card = get_recipe(model.spec.recipe).card
    parameters = sum(weight.numel() for weight in model.parameters())
    return f"""# {card.title}

{card.paper}. {card.summary}

The recipe `{card.name}` of manyformer, {parameters:,} parameters.

## Model settings

{model.spec.settings_list()}
"""
