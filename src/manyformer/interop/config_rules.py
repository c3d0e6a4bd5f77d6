"""Equal settings of two libraries, as rules that are read in both directions."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from manyformer.errors import UserError
from manyformer.interop.foreign_config import ForeignConfig

Keywords = dict[str, Any]


class ConfigRule(NamedTuple):
    """Fields of a config that say the same as some keywords of a recipe, and the functions from each to the other.

    `read` makes the keywords, and raises UserError for settings that the recipe does not have. `write` makes the
    fields, and raises UserError for keywords that no such config has."""

    read: Callable[[ForeignConfig], Keywords]
    write: Callable[[Mapping[str, Any]], Keywords]


def setting(
    field: str,
    keyword: str,
    read: Callable[[ForeignConfig], Any],
    write: Callable[[Mapping[str, Any]], Any] | None = None,
) -> ConfigRule:
    """A field and a keyword; without `write`, the field has the value of the keyword."""
    value_of = write or (lambda keywords: keywords[keyword])
    return ConfigRule(lambda config: {keyword: read(config)}, lambda keywords: {field: value_of(keywords)})


def size(field: str, keyword: str, default: int | str | None = None) -> ConfigRule:
    """A whole number of 1 or more; `default` stands for a missing field: a number, or the field that has it."""
    return setting(field, keyword, lambda config: config.size(field, default))


def optional_size(field: str, keyword: str) -> ConfigRule:
    """A whole number of 1 or more, or None."""
    return setting(field, keyword, lambda config: config.optional_size(field))


def number(field: str, keyword: str, default: float) -> ConfigRule:
    """A number of 0 or more; `default` stands for a missing field."""
    return setting(field, keyword, lambda config: config.number(field, default))


def flag(field: str, keyword: str, *, default: bool) -> ConfigRule:
    """True or false."""
    return setting(field, keyword, lambda config: config.flag(field, default=default))


def either(field: str, keyword: str, true: str, false: str) -> ConfigRule:
    """A flag that is true by default, and the choice that it stands for."""
    return setting(
        field,
        keyword,
        lambda config: true if config.flag(field, default=True) else false,
        lambda keywords: keywords[keyword] == true,
    )


def choice(field: str, keyword: str, default: str, names: Mapping[str, str]) -> ConfigRule:
    """One of some names, from theirs to ours; of several names for one of ours, the first is written."""

    def read(config: ForeignConfig) -> str:
        return names[config.choice(field, default, names)]

    def write(keywords: Mapping[str, Any]) -> str:
        for their_name, our_name in names.items():
            if our_name == keywords[keyword]:
                return their_name
        raise UserError(f"{keyword} is {keywords[keyword]}, and {field} can be {', '.join(names)} alone")

    return setting(field, keyword, read, write)


def required(*, missing: Any = ..., **values: Any) -> ConfigRule:
    """Fields that must have the only values which the recipe has; `missing`, else these, stands for missing fields."""

    def read(config: ForeignConfig) -> Keywords:
        for name, value in values.items():
            config.require(name, expected=value, default=value if missing is ... else missing)
        return {}

    return ConfigRule(read, lambda keywords: {})


def fixed(*, missing: Any = ..., **values: Any) -> ConfigRule:
    """Fields that must have the only values which the recipe has, and that exports name."""
    return required(missing=missing, **values)._replace(write=lambda keywords: values)


def written(**fields: Any) -> ConfigRule:
    """Fields that exports name, and that say nothing of an import."""
    return ConfigRule(lambda config: {}, lambda keywords: fields)


def copied(field: str, keyword: str) -> ConfigRule:
    """A field that exports fill from a keyword, which imports do not take over."""
    return ConfigRule(lambda config: {}, lambda keywords: {field: keywords[keyword]})


def implied(**keywords: Any) -> ConfigRule:
    """Keywords with the values that the class has in its code."""
    return ConfigRule(lambda config: keywords, lambda keywords: {})


def demanded(owner: str, **values: Any) -> ConfigRule:
    """Keywords that must have these values in exports, because `owner`, such as "a BERT", has no others."""

    def write(keywords: Mapping[str, Any]) -> Keywords:
        for name, value in values.items():
            if keywords[name] != value:
                raise UserError(f"{name} is {keywords[name]}, and {owner} has {value} alone")
        return {}

    return ConfigRule(lambda config: {}, write)
