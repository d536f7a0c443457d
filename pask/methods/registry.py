"""Finds every method: PASK's own room and each module of `baselines/`, none imported by name."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import baselines
import pask.methods
from pask.errors import PaskError
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
            except Exception as error:  # a newcomer's module: any error of theirs, in one line
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
            if cls.__module__ != module.__name__ or inspect.isabstract(cls):
                continue
            where = f"{module.__name__}.{cls.__name__}"
            missing = [field for field in _REQUIRED if not hasattr(cls, field)]
            if missing:
                raise PaskError(
                    f"the method declares no {', '.join(missing)}",
                    where=where,
                    todo="see baselines/README.md",
                )
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


@cache
def registry() -> dict[str, type[Method]]:
    """The methods of this installation, discovered once a process."""
    return discover()


def method_class(name: str) -> type[Method]:
    """The class registered as `name`; PaskError with the nearest name where there is none."""
    known = registry()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PaskError(f"unknown method {name!r}", todo=f"{hint}known: {', '.join(known)}")


def make_method(name: str, budget: float | None, params: Mapping[str, Any] | None = None) -> Method:
    """An instance of the method `name`.

    `budget` None takes the class's default. Unknown parameters and values that the method refuses
    raise PaskError.
    """
    cls = method_class(name)
    fields = {field.name for field in dataclasses.fields(cls)} - {"budget"}
    params = dict(params or {})
    for key in params:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            names = ", ".join(sorted(fields)) or "none"
            raise PaskError(
                f"unknown parameter {key!r}", where=f"method {name}", todo=f"{hint}known: {names}"
            )
    if budget is not None:
        params["budget"] = budget
    try:
        return cls(**params)
    except (TypeError, ValueError) as error:
        raise PaskError(str(error), where=f"method {name}", todo="mend the config") from error


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
            "parameters": {
                field.name: field.default
                for field in dataclasses.fields(cls)
                if field.name != "budget"
            },
        }
        for cls in registry().values()
    ]
