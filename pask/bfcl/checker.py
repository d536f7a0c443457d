"""BFCL's own AST checker, unmodified, behind one function.

The checker's module imports every vendor's SDK through `bfcl_eval.constants.model_config`, only to
look up whether a model rewrites dotted names. A stub stands in for that table while the checker is
loaded, under no public module name, and is taken away again: nothing else sees either of them.
"""

from __future__ import annotations

import copy
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pask.bfcl.answers import Call
from pask.bfcl.data import Row, package_root, pinned, read_pinned
from pask.errors import HarnessFault

_CHECKER = "eval_checker/ast_eval/ast_checker.py"
_MODEL_CONFIG = "bfcl_eval.constants.model_config"
_MODEL = "dots-kept"  # no "_" in it: the checker turns "_" into "/" before its look-up

MALFORMED = "malformed"
WRONG_FORMAT = "ast_decoder:decoder_wrong_output_format"  # the official runner's name for it


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right; if not, the official `error_type` and a message."""

    correct: bool
    error_type: str = ""
    error: str = ""


def check(row: Row, calls: list[Call] | None) -> Verdict:
    """Score an answer to a row as the official runner does.

    `calls` is the parsed answer, None where the output was no parseable answer (error type
    "malformed"). Dotted function names are compared as they are. Raises HarnessFault, naming the
    row, if the checker itself raises: that is never a wrong answer of the model.
    """
    if calls is None:
        return Verdict(False, MALFORMED, "the output is not a complete answer")
    if not _is_list_of_calls(calls):
        return Verdict(False, WRONG_FORMAT, "the answer is not a list of one-function calls")
    ast_checker, python = _official_checker()
    try:  # on copies: nothing promises that the checker leaves its arguments alone
        result = ast_checker(
            copy.deepcopy(list(row.functions)),
            copy.deepcopy(calls),
            copy.deepcopy(list(row.gold)),
            python,
            row.category,
            _MODEL,
        )
    except Exception as error:
        raise HarnessFault(
            "the official checker raised on an answer",
            where=row.id,
            why=f"{type(error).__name__}: {error}",
            todo=f"the answer was {calls!r}",
        ) from error
    if result["valid"]:
        return Verdict(True)
    return Verdict(False, result["error_type"], _message(result["error"]))


def _is_list_of_calls(answer: Any) -> bool:
    """The runner's own test before it calls the checker, which would let two-name calls pass."""
    return type(answer) is list and all(
        type(call) is dict and len(call) == 1 and all(type(a) is dict for a in call.values())
        for call in answer
    )


def _message(errors: list[Any]) -> str:
    """The checker's errors in a line; of a failed match, each call's error without the call."""
    parts = []
    for error in errors:
        if not isinstance(error, dict):
            parts.append(str(error))
            continue
        for call, found in error.items():
            parts.append(f"{call}: {found['sub_error_type']}: {' '.join(found['sub_error'])}")
    return "; ".join(parts)


@cache
def _official_checker() -> tuple[Callable[..., dict[str, Any]], Any]:
    """The official `ast_checker` and its `Language.PYTHON`; the file's digest is verified."""
    path = package_root() / _CHECKER
    source = read_pinned(path, pinned()["checker"][_CHECKER])
    python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    stub = types.ModuleType(_MODEL_CONFIG)
    vars(stub)["MODEL_CONFIG_MAPPING"] = {_MODEL: types.SimpleNamespace(underscore_to_dot=False)}
    module = types.ModuleType("bfcl_official_ast_checker")
    shadowed = sys.modules.get(_MODEL_CONFIG)
    sys.modules[_MODEL_CONFIG] = stub
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    finally:
        del sys.modules[_MODEL_CONFIG]
        if shadowed is not None:
            sys.modules[_MODEL_CONFIG] = shadowed
    return module.ast_checker, python
