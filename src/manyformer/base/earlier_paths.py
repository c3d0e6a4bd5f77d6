"""Import paths of earlier versions: they lead to where a module is now, with a warning that names the new path.

Python asks a finder at the end of `sys.meta_path` only where no file answers, so paths of today cost nothing."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

GONE_IN = "0.4"
"""The version that no longer knows these paths."""

LASTING = "manyformer.interop.auto_model"
"""The one earlier path that stays, without a warning: the code in folders that were exported to the hub imports it."""

MODULES = {
    "manyformer.api": "manyformer.conversion",
    "manyformer.attention": "manyformer.nn",
    "manyformer.autocast": "manyformer.nn.runtime.torch_internals",
    "manyformer.batches": "manyformer.nn.batches",
    "manyformer.bench": "manyformer.analysis.benchmarks",
    "manyformer.bound_step": "manyformer.nn.decoding.bound_step",
    "manyformer.check": "manyformer.analysis.contracts",
    "manyformer.compare": "manyformer.analysis.comparisons",
    "manyformer.context_windows": "manyformer.base.context_windows",
    "manyformer.core": "manyformer.nn.core",
    "manyformer.costs": "manyformer.nn.runtime.costs",
    "manyformer.data.graph_archive": "manyformer.data.graphs",
    "manyformer.data.length_buckets": "manyformer.data.batching.length_buckets",
    "manyformer.data.opened": "manyformer.data.pipeline.opened",
    "manyformer.data.saved_tokenizers": "manyformer.data.tokenizers.saved_tokenizers",
    "manyformer.data.synthetic": "manyformer.data.generated.synthetic",
    "manyformer.data.tokenizer": "manyformer.data.tokenizers.tokenizer",
    "manyformer.datastore": "manyformer.inference.datastore",
    "manyformer.decoding_options": "manyformer.inference.decoding_options",
    "manyformer.depth": "manyformer.nn.depth",
    "manyformer.device_reads": "manyformer.nn.runtime.device_reads",
    "manyformer.dropout": "manyformer.nn.runtime.dropout",
    "manyformer.environments": "manyformer.base.environments",
    "manyformer.environments.environment_names": "manyformer.base.environments",
    "manyformer.environments.graph_tasks": "manyformer.base.environments.memory_tasks",
    "manyformer.errors": "manyformer.base.errors",
    "manyformer.evaluate": "manyformer.inference.evaluate",
    "manyformer.exact_shares": "manyformer.nn.runtime.exact_shares",
    "manyformer.exits": "manyformer.inference.early_exit",
    "manyformer.experts": "manyformer.nn.feed_forward",
    "manyformer.feedforward": "manyformer.nn.feed_forward.feedforward",
    "manyformer.files": "manyformer.base.files",
    "manyformer.generate": "manyformer.inference.generate",
    "manyformer.head_selection": "manyformer.nn.runtime.head_selection",
    "manyformer.heads": "manyformer.analysis.heads",
    "manyformer.interop": "manyformer.conversion.hugging_face",
    "manyformer.kernels": "manyformer.nn",
    "manyformer.kernels.features": "manyformer.nn.linear",
    "manyformer.kernels.kernel": "manyformer.nn.kernels.kernel",
    "manyformer.keyword_checks": "manyformer.base.keyword_checks",
    "manyformer.length_norms": "manyformer.nn.runtime.length_norms",
    "manyformer.libraries": "manyformer.base.libraries",
    "manyformer.masks": "manyformer.nn.masks",
    "manyformer.mixers": "manyformer.nn",
    "manyformer.model_summary": "manyformer.recipes.parts.model_summary",
    "manyformer.models.classifier": "manyformer.models.encoder_model",
    "manyformer.ops": "manyformer.nn.ops",
    "manyformer.planning": "manyformer.analysis.planning",
    "manyformer.plugins": "manyformer.base.plugins",
    "manyformer.position": "manyformer.nn.positions",
    "manyformer.pruning": "manyformer.analysis.pruning",
    "manyformer.recipes.baselines": "manyformer.recipes.parts.baselines",
    "manyformer.recipes.stacks": "manyformer.recipes.parts.baselines",
    "manyformer.recompute": "manyformer.nn.runtime.recompute",
    "manyformer.residual": "manyformer.nn.residual",
    "manyformer.rollouts": "manyformer.data.rollouts",
    "manyformer.scores": "manyformer.models.scores",
    "manyformer.sources": "manyformer.nn.attention.kv_cache",
    "manyformer.spaces": "manyformer.base.spaces",
    "manyformer.structures": "manyformer.nn.structures",
    "manyformer.surgery": "manyformer.conversion.surgery",
    "manyformer.system": "manyformer.base.system",
    "manyformer.tasks": "manyformer.models.tasks",
    "manyformer.tasks.encoder_task": "manyformer.models.tasks.masked_language_modelling",
    "manyformer.torch_internals": "manyformer.nn.runtime.torch_internals",
    "manyformer.train": "manyformer.training",
    "manyformer.training_hooks": "manyformer.nn.runtime.training_hooks",
    "manyformer.training_worker": "manyformer.cli.training_worker",
    "manyformer.two_texts": "manyformer.nn.batches.two_texts",
    "manyformer.type_aliases": "manyformer.base.type_aliases",
    "manyformer.version": "manyformer.base",
    "manyformer.view": "manyformer.analysis.figures",
    "manyformer.view.figures": "manyformer.base.files.figures",
    "manyformer.viewer": "manyformer.analysis.viewer",
}
"""Modules and packages by their earlier path; what was in a package of that name is in the new one."""

NAMES: dict[str, dict[str, str]] = {
    "manyformer.check.tiny_models": {
        "build_tiny": "manyformer.analysis.own_models",
        "tiny_keywords": "manyformer.analysis.own_models",
    },
    "manyformer.data.tokenizer_kinds": {
        "train_tokenizer": "manyformer.data.tokenizers.saved_tokenizers",
    },
    "manyformer.properties": {
        "attention_properties": "manyformer.analysis.heads.properties",
        "permutation_change": "manyformer.analysis.heads.properties",
    },
    "manyformer.relevance": {
        "head_relevance": "manyformer.analysis.heads.relevance",
    },
    "manyformer.tasks.score_sums": {
        "ScoreSums": "manyformer.models.tasks.task",
    },
}
"""Modules whose contents are in several ones today: the module of each of their public names."""


class EarlierPaths:
    """A finder of modules by the paths that they had in earlier versions."""

    def __init__(self, modules: Mapping[str, str], names: Mapping[str, Mapping[str, str]]) -> None:
        self._modules = modules
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What loads the module of this earlier path; None if it is no such path."""
        # not a subclass of Loader, because importlib.abc takes longer to import than all of this
        loader: Any
        if fullname in self._names:
            loader = _EarlierPackageLoader("", self._names[fullname])
            return ModuleSpec(fullname, loader, is_package=True)
        current = self.current_path(fullname)
        spec = _find(current) if current else None
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            loader = _EarlierModuleLoader(spec.name)
            return ModuleSpec(fullname, loader)
        loader = _EarlierPackageLoader(spec.name, {})
        return ModuleSpec(fullname, loader, is_package=True)

    def current_path(self, fullname: str) -> str:
        """Where a module of this earlier path would be today, by the longest part that is known; "" if none is."""
        prefix = fullname
        while prefix and prefix not in self._modules:
            prefix = prefix.rpartition(".")[0]
        return self._modules[prefix] + fullname.removeprefix(prefix) if prefix else ""


class _EarlierModuleLoader:
    """Gives the module of today under its earlier name: one object, whose classes are the same."""

    def __init__(self, current: str) -> None:
        self._current = current

    def create_module(self, spec: ModuleSpec) -> None:
        """The import system creates an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        # level 2: the import statement, since warnings skip the frames of the import system
        _warn(module.__name__, self._current, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(self._current)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code that `python -m` runs."""
        spec = _find(self._current)
        assert spec is not None
        _warn(fullname, self._current, stacklevel=2)
        code: CodeType | None = getattr(spec.loader, "get_code")(self._current)  # noqa: B009 - loaders of files have it
        return code


class _EarlierPackageLoader:
    """Gives a package without files, whose names and modules are looked up when they are used."""

    def __init__(self, current: str, names: Mapping[str, str]) -> None:
        self._current = current
        self._names = names

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EarlierPackage(spec.name, self._current, self._names)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _EarlierPackage(ModuleType):
    # Not the package of today itself: Python would find its files under the earlier name, and load them a second time.

    def __init__(self, name: str, current: str, names: Mapping[str, str]) -> None:
        super().__init__(name)
        self._current = current
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return list(self._names) or _public_names(importlib.import_module(self._current))
        module = self._names.get(name, self._current)
        if name.startswith("__") or not module:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        value = getattr(importlib.import_module(module), name)
        _warn(f"{self.__name__}.{name}", f"{module}.{name}", stacklevel=2)
        return value


def _public_names(module: ModuleType) -> list[str]:
    names: list[str] = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return names


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _warn(earlier: str, current: str, *, stacklevel: int) -> None:
    """Warn whoever is that many calls above the caller, at 1 the caller itself; not of the path that stays."""
    if earlier == LASTING or earlier.startswith(f"{LASTING}."):
        return
    warnings.warn(
        f"{earlier} is {current} now; the earlier path is gone in version {GONE_IN}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def install() -> None:
    """Let imports find the earlier paths, after all others."""
    if MODULES or NAMES:
        sys.meta_path.append(EarlierPaths(MODULES, NAMES))
