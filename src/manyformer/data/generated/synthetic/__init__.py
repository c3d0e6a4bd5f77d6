"""Rules that generate sequences of tasks with known answers; importing a file registers its rules.

Their settings stand in `config/data_sections`: run files are read without NumPy."""

import importlib
import pkgutil

from manyformer.data.generated.synthetic.synthetic_rule import (
    RULES,
    SyntheticRows,
    SyntheticRule,
    make_rule,
    register_rule,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["RULES", "SyntheticRows", "SyntheticRule", "make_rule", "register_rule"]
