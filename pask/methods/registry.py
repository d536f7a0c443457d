"""Finds every method: PASK's own room and each module of `baselines/`, none imported by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, get_type_hints

import baselines
import pask.methods
from pask.errors import PaskError, known_names
from pask.methods.contract import Method

_REQUIRED = ("name", "label", "paper", "color", "marker", "knob", "budgets")


def _modules(packages: Iterable[ModuleType]) -> Iterable[ModuleType]:
    for package in packages:
        for found in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
            full_name = f"{package.__name__}.{found.name}"
            if full_name == __name__:
                continue
            try:
                yield importlib.import_module(full_name)
            except PaskError:
                raise
            except (Exception, SystemExit) as error:  # whatever a newcomer's file raises
                raise PaskError(
                    "this method module does not import",
                    where=full_name,
                    why=f"{type(error).__name__}: {error}",
                    todo="mend or remove the file",
                ) from error


def discover(packages: Iterable[ModuleType] = (pask.methods, baselines)) -> dict[str, type[Method]]:
    """Every concrete `Method` defined in the packages' modules, by registered name, sorted.

    Raises PaskError where a class lacks a declaration or two classes share a name.
    """
    found: dict[str, type[Method]] = {}
    for module in _modules(packages):
        for cls in vars(module).values():
            if not (inspect.isclass(cls) and issubclass(cls, Method)):
                continue
            if cls.__module__ != module.__name__:
                continue
            if inspect.isabstract(cls) and "name" not in vars(cls):
                continue  # a base that several methods share
            where = f"{module.__name__}.{cls.__name__}"
            _check_declarations(cls, where)
            if cls.name in found:
                other = found[cls.name]
                raise PaskError(
                    f"the name {cls.name!r} is taken",
                    where=where,
                    why=f"{other.__module__}.{other.__name__} has it",
                    todo="choose another name",
                )
            found[cls.name] = cls
    return dict(sorted(found.items()))


def _check_declarations(cls: type[Method], where: str) -> None:
    """Raise PaskError for a method class that lacks or garbles one of its declarations."""
    todo = "see baselines/README.md"
    missing = [field for field in _REQUIRED if not hasattr(cls, field)]
    missing += sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise PaskError(f"the method declares no {', '.join(missing)}", where=where, todo=todo)
    if not isinstance(cls.name, str) or not re.fullmatch(r"[a-z0-9_]+", cls.name):
        raise PaskError(f"name {cls.name!r} is not of a-z, 0-9 and _", where=where, todo=todo)
    if not isinstance(cls.color, str) or not re.fullmatch(r"#[0-9a-fA-F]{6}", cls.color):
        raise PaskError(f"color {cls.color!r} is not like #0072b2", where=where, todo=todo)
    try:
        low, high = cls.budgets
        sound = 0 < low <= high <= 1
    except (TypeError, ValueError):
        sound = False
    if not sound:
        what = f"budgets {cls.budgets!r} is not (low, high) within 0..1"
        raise PaskError(what, where=where, todo=todo)
    try:
        low, high = cls.knob_range
        sound = low < high
    except (TypeError, ValueError):
        sound = False
    if not sound:
        what = f"knob_range {cls.knob_range!r} is not (low, high)"
        raise PaskError(what, where=where, todo=todo)
    if cls.calibrated is True and cls.calibrate is Method.calibrate:
        raise PaskError("calibrated, but without calibrate()", where=where, todo=todo)


def _check_types(cls: type[Method], params: Mapping[str, Any]) -> None:
    """Raise TypeError for a parameter whose value is not of the field's declared type."""
    hints = get_type_hints(cls)
    for key, value in params.items():
        wanted = {float: (float, int)}.get(hints[key], hints[key])
        plain = isinstance(wanted, tuple) or wanted in (int, str, bool)
        if plain and (not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)):
            raise TypeError(f"{key} must be {hints[key].__name__}, not {value!r}")


@cache
def registry() -> dict[str, type[Method]]:
    """The methods of this installation, discovered once a process."""
    return discover()


def method_class(name: str) -> type[Method]:
    """The class registered as `name`; PaskError with the nearest name where there is none."""
    known = registry()
    if name in known:
        return known[name]
    raise PaskError(f"unknown method {name!r}", todo=known_names(name, known))


def make_method(
    name: str,
    budget: float | None,
    params: Mapping[str, Any] | None = None,
    *,
    nominal: float | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Method:
    """An instance of the method `name`.

    `budget` None takes the class's default; `nominal` is the searched value of its knob, `measured`
    are the fields that its calibration gave. Unknown parameters and values that the method refuses
    raise PaskError.
    """
    cls = method_class(name)
    fields = _parameters(cls)
    params = dict(params or {})
    for key in (*params, *(measured or {})):
        if key not in fields:
            raise PaskError(
                f"unknown parameter {key!r}",
                where=f"method {name}",
                todo=known_names(str(key), sorted(fields)),
            )
    for key in params.keys() & (measured or {}).keys():
        raise PaskError(
            f"the parameter {key!r} is measured",
            where=f"method {name}",
            todo="leave it out of the config: calibration sets it",
        )
    if budget is not None:
        params["budget"] = budget
    try:
        _check_types(cls, params)
        params |= {"nominal": nominal, **(measured or {})}
        return cls(**params)
    except (TypeError, ValueError) as error:
        raise PaskError(str(error), where=f"method {name}", todo="mend the config") from error


def _parameters(cls: type[Method]) -> dict[str, Any]:
    """Defaults of the fields that a config may set."""
    return {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if field.name not in ("budget", "nominal")
    }


def describe() -> list[dict[str, Any]]:
    """One plain record a method, for `pask methods`."""
    return [
        {
            "name": cls.name,
            "label": cls.label,
            "paper": cls.paper,
            "knob": cls.knob,
            "budgets": list(cls.budgets),
            "color": cls.color,
            "marker": cls.marker,
            "module": cls.__module__,
            "parameters": _parameters(cls),
        }
        for cls in registry().values()
    ]
