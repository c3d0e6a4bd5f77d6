"""Passes with the cache of `transformers`, which versions before 5.24 call `past_key_values`."""

import inspect
from typing import Any

from torch import Tensor

from manyformer.analysis.contracts.hugging_face import CACHE_NAMES


def cache_name(model: Any) -> str:
    """What a model's or its class's `forward` and its outputs call the cache."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


def cached_pass(model: Any, cache: Any, **inputs: Any) -> tuple[Tensor, Any]:
    """The logits of a pass that continues from `cache`, None at the start, and the cache after it."""
    name = cache_name(model)
    output = model(**inputs, **{name: cache}, use_cache=True)
    return output.logits, output[name]
