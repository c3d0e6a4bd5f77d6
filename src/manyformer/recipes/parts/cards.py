"""Cards of recipes, and how they are read from the files of recipes without importing these, which takes seconds."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

from manyformer.base.plugins import RECIPE_GROUP, import_entry_points, is_external

if TYPE_CHECKING:
    from manyformer.models import Model
    from manyformer.models.tasks import Task

PROMISES = {
    "causal": "no output depends on a later token",
    "incremental_decoding": "decoding from a cached state gives the same outputs as one pass",
    "cross_attention": "it attends to a second sequence",
    "padding_invariant": "padding and packing do not change the outputs",
}
"""The contracts that a recipe promises unless it gives a reason, with their meanings."""

FACTS = {
    "heads": "layers have heads that an output projection joins",
    "removable_heads": "single heads can be removed",
    "attention_dropout": "dropout can act on the weights of attention",
    "attention_maps": "its attention has weights to show",
    "pair_weights": "attention has weights for pairs of tokens of the text",
    "convex_weights": "attention gives means of values, inside their convex hull",
    "one_graph": "a training step compiles as one graph",
}
"""What else holds of a recipe unless it gives a reason: what tools for heads, attention and compilation can do."""

FAMILIES = {
    "softmax": "softmax attention to all tokens",
    "sparse": "windows, patterns and chosen blocks",
    "clustered": "attention among similar tokens",
    "low-rank": "attention through fewer vectors than tokens",
    "linear": "linear attention and state spaces",
    "recurrent": "recurrent networks",
    "memory": "memories beyond the segment",
    "hybrid": "several of these in one model",
    "experts": "mixtures of experts",
    "depth": "depth that depends on the token",
    "mixing": "mixing of tokens without attention to them",
    "graph": "attention along edges",
    "other": "recipes that name no family",
}
"""What a recipe's tokens learn from one another by, with the meanings, in the order of lists."""


@dataclass(frozen=True, kw_only=True)
class CardText:
    """What a card says of a recipe. `task` has a name and reasons; `RecipeCard` has the task itself."""

    name: str
    title: str
    paper: str
    summary: str
    task: Any
    cost: str
    family: str = "other"
    constant_state: bool = False
    backends: tuple[str, ...] = ("cpu", "cuda", "mps")
    reasons: dict[str, str] = field(default_factory=dict)
    tiny_keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def promises(self) -> list[str]:
        """The names of the contracts that it promises: those that it gives no reason against."""
        return [name for name in PROMISES if name not in self.reasons]

    @property
    def state(self) -> str | None:
        """Whether what decoding keeps is "constant" or "grows" with the text; None if it decodes from no state."""
        if "incremental_decoding" in self.reasons:
            return None
        if self.constant_state:
            return "constant"
        return "grows"

    @property
    def year(self) -> int | None:
        """The year of the first paper that it names."""
        match = re.search(r"\b(19|20)\d\d\b", self.paper)
        if match:
            return int(match[0])
        return None


@dataclass(frozen=True, kw_only=True)
class RecipeCard(CardText):
    """A recipe's description and contracts, which `manyformer.check` tests and the documentation shows.

    `family` is one of `FAMILIES`. `constant_state` says that what decoding keeps stops growing, at once or at the size
    of a window or memory that a keyword sets. `reasons` says why a contract of `PROMISES` is not promised (for those of
    the task by default), why the recipe fails a contract of `manyformer.check`, and why one of `FACTS` does not hold of
    it. `tiny_keywords` are the keywords, beyond the common ones, of the tiny model that the contracts test."""

    task: "Task"


@dataclass(frozen=True)
class Recipe:
    """A published model as a function of its keywords."""

    card: RecipeCard
    build: Callable[..., "Model"]

    @property
    def module(self) -> str:
        """The module that defines it."""
        return self.build.__module__

    @property
    def signature(self) -> inspect.Signature:
        """The keywords with their types and defaults; names of parts that plug-ins have added are among the choices."""
        return signature_with_choices(inspect.signature(self.build))


def signature_with_choices(signature: inspect.Signature) -> inspect.Signature:
    """A signature in which the names of parts, those of plug-ins too, are the choices of their keywords."""
    parameters = signature.parameters.values()
    return signature.replace(
        parameters=[parameter.replace(annotation=with_choices(parameter.annotation)) for parameter in parameters]
    )


def with_choices(annotation: Any) -> Any:
    """`Annotated[str, tables, meaning]` with a Literal of the names in the tables now, also for `str | None`.

    Other types are returned as they are."""
    inner, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    tables = [table for table in metadata if isinstance(table, Mapping)]
    if not tables:
        return annotation
    # read anew at each call: a plug-in may have added a name since the recipe was registered
    choices: Any = Literal.__getitem__(tuple(dict.fromkeys(name for table in tables for name in table)))
    choices = choices if inner is str else choices | None
    meanings = [item for item in metadata if isinstance(item, str)]
    if meanings:
        return Annotated[choices, *meanings]
    return choices


def with_task_reasons(task_reasons: Any, reasons: dict[str, str]) -> dict[str, str]:
    """The reasons of a card: those of its task against promises, and its own."""
    return {**{name: reason for name, reason in task_reasons.items() if name in PROMISES}, **reasons}


RECIPES_PACKAGE = __name__.rpartition(".parts.")[0]
PACKAGE_FOLDER = Path(__file__).parents[2]
_DECLARED_RECIPE = re.compile(r"^@recipe\(.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)

REGISTERED: dict[str, Recipe] = {}
"""The recipes of all modules imported so far by name."""

OWN_PREFIX = "own:"
"""How the names of modules begin that were given as objects, not by a file."""

OWN_RECIPES: dict[str, Recipe] = {}
"""Modules of the user's own that this process trains, by their names; no list of recipes has them."""


@cache
def recipe_modules() -> dict[str, str]:
    """The names of this package's recipes with the modules that declare them, from the text of their files.

    Empty where the package has no files of source code."""
    modules = {}
    for file in sorted((PACKAGE_FOLDER / "recipes").glob("*.py")):
        for function in _DECLARED_RECIPE.findall(file.read_text(encoding="utf-8")):
            modules[function.replace("_", "-")] = f"{RECIPES_PACKAGE}.{file.stem}"
    return modules


def import_own_recipes() -> None:
    """Import the modules of all recipes of this package, which registers them."""
    package = importlib.import_module(RECIPES_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{RECIPES_PACKAGE}.{module.name}")


class ListedRecipe(NamedTuple):
    """A recipe as lists show it."""

    card: CardText
    module: str


def listed_recipes() -> dict[str, ListedRecipe]:
    """All recipes by name: those of this package without importing them, those of plug-ins as these register them."""
    import_entry_points(RECIPE_GROUP)
    listed = {}
    for name, module in recipe_modules().items():
        try:
            card = _declared_card(module, name)
        except Unreadable:
            importlib.import_module(module)
            card = REGISTERED[name].card
        listed[name] = ListedRecipe(card, module)
    if not listed:
        import_own_recipes()
    for name, recipe in REGISTERED.items():
        if not listed.get(name) and (is_external(recipe.module) or not recipe_modules()):
            listed[name] = ListedRecipe(recipe.card, recipe.module)
    return dict(sorted(listed.items()))


class Unreadable(Exception):
    """An expression whose value cannot be told from the text alone."""


class DeclaredTask(NamedTuple):
    """What cards need of a task, read from its class."""

    name: str
    reasons: dict[str, str]


def _declared_card(module: str, name: str) -> CardText:
    """The card that the decorator of a recipe makes, read from its file. Raises Unreadable."""
    function = _statements(module).get(name.replace("-", "_"))
    if not isinstance(function, ast.FunctionDef):
        raise Unreadable(f"{module} has no function for {name}")
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "recipe":
            keywords = {str(keyword.arg): _value(module, keyword.value) for keyword in decorator.keywords}
            (title,) = (_value(module, argument) for argument in decorator.args)
            reasons = with_task_reasons(keywords["task"].reasons, keywords.pop("reasons", {}))
            return CardText(name=name, title=title, reasons=reasons, **keywords)
    raise Unreadable(f"{module}.{name} is no recipe")


@cache
def _statements(module: str) -> dict[str, ast.stmt]:
    """The statements of a module of this package that bind a name: assignments, classes, functions and imports."""
    path = PACKAGE_FOLDER.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    named: dict[str, ast.stmt] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        for name in _bound_names(statement):
            named[name] = statement
    return named


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.ClassDef() | ast.FunctionDef():
            yield statement.name
        case ast.ImportFrom():
            yield from (alias.asname or alias.name for alias in statement.names)
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _value(module: str, expression: ast.expr | None) -> Any:
    """The value of constants, their names, and tuples, dictionaries and texts made of them. Raises Unreadable."""
    match expression:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(module, operand)
        case ast.Tuple(elts=elements):
            return tuple(_value(module, element) for element in elements)
        case ast.Dict():
            return _dictionary(module, expression)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _value(module, left) | _value(module, right)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return _attribute(module, name, attribute)
        case ast.JoinedStr(values=parts):
            return "".join(_value(module, part) for part in parts)
        case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
            return str(_value(module, inner))
        case ast.Name(id=name):
            place, statement = _definition(module, name)
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                return _value(place, statement.value)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
            return DeclaredTask(_attribute(module, name, "name"), _attribute(module, name, "reasons"))
    raise Unreadable(f"{module}: {ast.unparse(expression) if expression else None}")


def _dictionary(module: str, expression: ast.Dict) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key, value in zip(expression.keys, expression.values):
        if key is None:
            mapping.update(_value(module, value))
        else:
            mapping[_value(module, key)] = _value(module, value)
    return mapping


def _definition(module: str, name: str) -> tuple[str, ast.stmt]:
    """The module of this package and the statement in it that define what `name` is in a module. Raises Unreadable."""
    statement = _statements(module).get(name)
    if isinstance(statement, ast.ImportFrom) and not is_external(statement.module or ""):
        for alias in statement.names:
            if name == (alias.asname or alias.name):
                return _definition(str(statement.module), alias.name)
    if statement is None or isinstance(statement, ast.ImportFrom):
        raise Unreadable(f"{module}.{name}")
    return module, statement


def _attribute(module: str, class_name: str, attribute: str) -> Any:
    """The value that the body of a class, or that of its bases, gives an attribute. Raises Unreadable."""
    # Python asks a base that several classes share after all of them: where it comes last
    order = dict.fromkeys(reversed(list(_with_bases(module, class_name))))
    for place, statement in reversed(order):
        for line in statement.body:
            if isinstance(line, ast.Assign | ast.AnnAssign) and line.value and attribute in _bound_names(line):
                return _value(place, line.value)
    raise Unreadable(f"{module}.{class_name}.{attribute}")


def _with_bases(module: str, class_name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class of this package and its bases, depth first, with the modules that define them."""
    place, statement = _definition(module, class_name)
    if not isinstance(statement, ast.ClassDef):
        raise Unreadable(f"{place}.{class_name} is no class")
    yield place, statement
    for base in statement.bases:
        # Task[LanguageModel] is Task
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and _is_own(place, name.id):
            yield from _with_bases(place, name.id)


def _is_own(module: str, name: str) -> bool:
    statement = _statements(module).get(name)
    return statement is not None and not (isinstance(statement, ast.ImportFrom) and is_external(str(statement.module)))
