"""The entire Transformer family in one library and command line.

`import manyformer as mf`, then `mf.recipes()`, `mf.build(name, **keywords)`, `mf.load(path)`, `model.save(path)`,
`mf.train(...)`, `mf.evaluate(run)`, `mf.compare(cases)`, `mf.advise(task=...)`, `mf.generate(model, prompts)`,
`mf.denoise(model, prompts)`, `mf.check(model)`, `mf.explain(model, tokens)`, `mf.view(model, text)`,
`mf.draw(mask, length)`, `mf.knn_lm(model, mf.Datastore(folder))`.
Importing the package does not load torch; the first use of a name does.
"""

from typing import TYPE_CHECKING

from manyformer.base import VERSION as __version__
from manyformer.base.earlier_paths import install as _install_earlier_paths
from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.comparisons import advise, compare
    from manyformer.analysis.contracts.data_check import check_data
    from manyformer.analysis.contracts.scorers import check_scorer
    from manyformer.analysis.figures import draw
    from manyformer.analysis.own_models import check
    from manyformer.analysis.pruning import prune_heads
    from manyformer.analysis.viewer import view
    from manyformer.config import TransferConfig
    from manyformer.conversion import build, explain, load, recipes
    from manyformer.conversion.surgery import convert
    from manyformer.conversion.surgery.head_sharing import collaborate
    from manyformer.conversion.surgery.recipe_conversions import memorize
    from manyformer.inference.datastore import Datastore, knn_lm
    from manyformer.inference.denoising import denoise
    from manyformer.inference.evaluate import evaluate
    from manyformer.inference.generate import generate
    from manyformer.models.with_early_exit import early_exit
    from manyformer.training import train

_MODULES = {
    "Datastore": "manyformer.inference.datastore",
    "TransferConfig": "manyformer.config",
    "advise": "manyformer.analysis.comparisons",
    "build": "manyformer.conversion",
    "check": "manyformer.analysis.own_models",
    "check_data": "manyformer.analysis.contracts.data_check",
    "check_scorer": "manyformer.analysis.contracts.scorers",
    "collaborate": "manyformer.conversion.surgery.head_sharing",
    "compare": "manyformer.analysis.comparisons",
    "convert": "manyformer.conversion.surgery",
    "denoise": "manyformer.inference.denoising",
    "draw": "manyformer.analysis.figures",
    "early_exit": "manyformer.models.with_early_exit",
    "evaluate": "manyformer.inference.evaluate",
    "explain": "manyformer.conversion",
    "generate": "manyformer.inference.generate",
    "knn_lm": "manyformer.inference.datastore",
    "load": "manyformer.conversion",
    "memorize": "manyformer.conversion.surgery.recipe_conversions",
    "prune_heads": "manyformer.analysis.pruning",
    "recipes": "manyformer.conversion",
    "train": "manyformer.training",
    "view": "manyformer.analysis.viewer",
}

__all__ = [
    "Datastore",
    "TransferConfig",
    "__version__",
    "advise",
    "build",
    "check",
    "check_data",
    "check_scorer",
    "collaborate",
    "compare",
    "convert",
    "denoise",
    "draw",
    "early_exit",
    "evaluate",
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


_offer_names(__name__, _MODULES)
_install_earlier_paths()
