"""Packages whose public names are imported when they are first used."""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """The type of a package that `offer_names` was called for."""

    offered_names: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self.offered_names:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        value = getattr(importlib.import_module(self.offered_names[name]), name)
        # found at once the next time
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # importing a module of the package must not hide the public function of the same name
        if not (name in self.offered_names and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def offer_names(package: str, modules: Mapping[str, str]) -> None:
    """Offer the names in `package`, each of which is imported from its module when it is first used."""
    module = sys.modules[package]
    vars(module)["offered_names"] = modules
    module.__class__ = LazyPackage
