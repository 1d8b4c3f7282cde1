"""One frozen dataclass per process becomes its flags, its NIGHTJAR_* variables and its help.

A flag wins over a variable, a variable over the default. Bad input is a `ConfigError`
that names key and value; unknown flags are refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from nightjar.errors import ConfigError

ConfigT = TypeVar("ConfigT")


def option(
    default: Any, help: str, *, check: Callable[[Any], bool] | None = None, limit: str = ""
) -> Any:
    """Declare a configuration field.

    Args:
        default: Value without a flag or variable.
        help: What it does, in one sentence with its unit.
        check: True for values that are allowed.
        limit: Words for what `check` allows, for example "1 to 65535".
    """
    metadata = {"help": help, "check": check, "limit": limit}
    return dataclasses.field(default=default, metadata=metadata)


def at_least(minimum: float, default: Any, help: str) -> Any:
    """Declare a number that must not lie below `minimum`."""
    return option(
        default, help, check=lambda value: value >= minimum, limit=f"at least {minimum:g}"
    )


def parse(
    cls: type[ConfigT],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    environ: Mapping[str, str] | None = None,
) -> ConfigT:
    """Build `cls` from flags and variables; exits with status 2 on an unknown flag.

    Raises:
        ConfigError: A value has the wrong type or lies outside its limits.
    """
    environ = os.environ if environ is None else environ
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Each flag can be given as a variable: --some-flag is NIGHTJAR_SOME_FLAG.",
    )
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        words = [field.metadata.get("help", "")]
        words += [f"({field.metadata['limit']})"] if field.metadata.get("limit") else []
        words += [f"[default: {'none' if field.default in ('', None) else field.default}]"]
        choices = (
            get_args(hints[field.name]) if get_origin(hints[field.name]) is typing.Literal else None
        )
        metavar = "{" + ",".join(map(str, choices)) + "}" if choices else None
        text = " ".join(words).replace("%", "%%")
        parser.add_argument(_flag(field.name), help=text, metavar=metavar, default=None)
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    for field in fields:
        variable = f"NIGHTJAR_{field.name.upper()}"
        for key, raw in ((_flag(field.name), given[field.name]), (variable, environ.get(variable))):
            if raw is not None:
                values[field.name] = _checked(field, key, raw, hints[field.name])
                break
    return cls(**values)


def to_argv(config: object) -> list[str]:
    """Flags that `parse` turns back into `config`; fields that are None are left out."""
    pairs = [(f.name, getattr(config, f.name)) for f in dataclasses.fields(config)]  # type: ignore[arg-type]
    return [f"{_flag(name)}={_text(value)}" for name, value in pairs if value is not None]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _checked(field: dataclasses.Field[Any], key: str, text: str, hint: Any) -> Any:
    try:
        value = _convert(text, hint)
    except ValueError as error:
        raise ConfigError(f"{key}={text!r}: {error}") from None
    check = field.metadata.get("check")
    if value is not None and check is not None and not check(value):
        raise ConfigError(f"{key}={text!r}: must be {field.metadata['limit']}")
    return value


def _convert(text: str, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # X | None
        return None if text == "" else _convert(text, args[0])
    if origin is typing.Literal:
        if text not in args:
            raise ValueError(f"must be one of {', '.join(args)}")
        return text
    if origin is tuple:
        return tuple(_convert(part.strip(), args[0]) for part in text.split(",") if part.strip())
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError("must be true or false")
        return text.lower() in ("true", "1")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"must be {'a whole number' if hint is int else 'a number'}") from None
    return text
