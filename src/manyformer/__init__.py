"""The entire Transformer family in one library and command line.

`import manyformer as mf`, then `mf.recipes()`, `mf.build(name, **keywords)`, `mf.load(path)`, `model.save(path)`,
`mf.train(...)`, `mf.generate(model, prompts)`, `mf.check(model)`, `mf.explain(model, tokens)`, `mf.view(model, text)`,
`mf.draw(mask, length)`, `mf.knn_lm(model, mf.Datastore(folder))`.
Importing the package does not load torch; the first use of a name does.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from manyformer.earlier_paths import install as _install_earlier_paths
from manyformer.version import VERSION as __version__

if TYPE_CHECKING:
    from manyformer.api import build, explain, load, recipes
    from manyformer.check import check
    from manyformer.config import TransferConfig
    from manyformer.datastore import Datastore, knn_lm
    from manyformer.generate import generate
    from manyformer.models.with_early_exit import early_exit
    from manyformer.pruning import prune_heads
    from manyformer.surgery import convert
    from manyformer.surgery.head_sharing import collaborate
    from manyformer.surgery.recipe_conversions import memorize
    from manyformer.train import train
    from manyformer.view import draw
    from manyformer.viewer import view

_MODULES = {
    "Datastore": "manyformer.datastore",
    "TransferConfig": "manyformer.config",
    "build": "manyformer.api",
    "check": "manyformer.check",
    "collaborate": "manyformer.surgery.head_sharing",
    "convert": "manyformer.surgery",
    "draw": "manyformer.view",
    "early_exit": "manyformer.models.with_early_exit",
    "explain": "manyformer.api",
    "generate": "manyformer.generate",
    "knn_lm": "manyformer.datastore",
    "load": "manyformer.api",
    "memorize": "manyformer.surgery.recipe_conversions",
    "prune_heads": "manyformer.pruning",
    "recipes": "manyformer.api",
    "train": "manyformer.train",
    "view": "manyformer.viewer",
}

__all__ = [
    "Datastore",
    "TransferConfig",
    "__version__",
    "build",
    "check",
    "collaborate",
    "convert",
    "draw",
    "early_exit",
    "explain",
    "generate",
    "knn_lm",
    "load",
    "memorize",
    "prune_heads",
    "recipes",
    "train",
    "view",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'manyformer' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


class _Package(ModuleType):
    """The package's module type: importing a subpackage must not hide the public function of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
_install_earlier_paths()
