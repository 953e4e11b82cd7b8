"""Plain values, as YAML gives them, into typed ones; a wrong type, range or key is an error that names it."""

import reprlib
import types
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from rlhf.errors import UserError

# A value in a message: aliases make a short file of a value too long to write.
SHOWN = reprlib.Repr()
SHOWN.maxlevel, SHOWN.maxother, SHOWN.maxlong, SHOWN.maxstring = 3, 80, 80, 80


class Rule(NamedTuple):
    """A range: `holds(value)` must be true, `text` says what was expected."""

    text: str
    holds: Any


Count = Annotated[int, Rule("an integer of at least 1", lambda v: v >= 1)]
Several = Annotated[int, Rule("an integer of at least 2", lambda v: v >= 2)]
Natural = Annotated[int, Rule("an integer of at least 0", lambda v: v >= 0)]
Positive = Annotated[float, Rule("a finite number above 0", lambda v: 0 < v < float("inf"))]
NonNegative = Annotated[float, Rule("a finite number of at least 0", lambda v: 0 <= v < float("inf"))]
Fraction = Annotated[float, Rule("a number from 0 to 1", lambda v: 0 <= v <= 1)]
BelowOne = Annotated[float, Rule("a number from 0 to below 1", lambda v: 0 <= v < 1)]
Text = Annotated[str, Rule("a text that is not empty", lambda v: v.strip() != "")]
Sha256 = Annotated[
    str, Rule("64 hexadecimal digits", lambda v: len(v) == 64 and not set(v) - set("0123456789abcdef"))
]
Seeds = Annotated[
    tuple[Natural, ...], Rule("at least one seed, none twice", lambda v: len(v) > 0 and len(set(v)) == len(v))
]


def parse(key: str, value: Any, expected: Any) -> Any:
    """Turn `value`, found under `key`, into `expected`: a dataclass, or a type of its fields."""
    if get_origin(expected) is Annotated:
        base, *rules = get_args(expected)
        parsed = parse(key, value, base)
        for rule in rules:
            if not rule.holds(parsed):
                raise _wrong(key, value, rule.text)
        return parsed
    if is_dataclass(expected):
        return _parse_section(key, value, expected)
    if get_origin(expected) in (Union, types.UnionType):
        (inner,) = [option for option in get_args(expected) if option is not type(None)]
        return None if value is None else parse(key, value, inner)
    if get_origin(expected) is Literal:
        if value not in get_args(expected) or not isinstance(value, str):
            raise _wrong(key, value, "one of " + ", ".join(get_args(expected)))
        return value
    if get_origin(expected) is tuple:
        if not isinstance(value, list):
            raise _wrong(key, value, "a list")
        return tuple(parse(f"{key}[{i}]", item, get_args(expected)[0]) for i, item in enumerate(value))
    if get_origin(expected) is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise _wrong(key, value, "a mapping with text keys")
        return {name: parse(f"{key}.{name}", item, get_args(expected)[1]) for name, item in value.items()}
    return _parse_scalar(key, value, expected)


def _parse_section(key: str, value: Any, expected: type) -> Any:
    if not isinstance(value, dict):
        raise _wrong(key, value, "a mapping")
    known = [field.name for field in fields(expected)]
    for name in value:
        if name not in known:
            raise UserError(f"{key}: unknown key {_shown(name)}: expected {', '.join(known)}")
    for name in known:
        if name not in value:
            raise UserError(f"{key}: missing key {name!r}")
    hints = get_type_hints(expected, include_extras=True)
    return expected(**{name: parse(_join(key, name), value[name], hints[name]) for name in known})


def _parse_scalar(key: str, value: Any, expected: type) -> Any:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _wrong(key, value, "a number") from None
    if type(value) is not expected:
        names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
        raise _wrong(key, value, names[expected])
    if expected is int and not -(2**63) <= value < 2**63:
        raise _wrong(key, value, "an integer of 64 bits")
    return value


def _join(key: str, name: str) -> str:
    return f"{key}: {name}" if ": " not in key and key.endswith((".yaml", ".yml")) else f"{key}.{name}"


def _wrong(key: str, value: Any, expected: str) -> UserError:
    return UserError(f"{key} is {_shown(value)}: expected {expected}")


def _shown(value: Any) -> str:
    try:
        return SHOWN.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits, which YAML can give in base 16
        return "a number of too many digits"
