"""A method is a file: found, described, or refused in one line, with nothing else edited."""

import sys
import types
from pathlib import Path

import pytest

import baselines
import pask.methods
from pask.errors import PaskError
from pask.methods.registry import describe, discover, make_method, method_class, registry

NEW_METHOD = """
from dataclasses import dataclass
from typing import ClassVar

from pask.methods.contract import Captures, Method, Placement, PromptInfo, RequestState


class KeepAll(RequestState):
    def place(self, layer: int, captures: Captures) -> Placement:
        return Placement()


@dataclass(frozen=True)
class Mine(Method):
    strength: float = 2.0
    name: ClassVar[str] = "{name}"
    label: ClassVar[str] = "Mine"
    paper: ClassVar[str] = "unpublished"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "strength"
    budgets: ClassVar[tuple[float, float]] = (0.1, 1.0)

    def open(self, info: PromptInfo) -> RequestState:
        return KeepAll()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`baselines` with one more folder in its path, forgotten again after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(baselines, "__path__", [*baselines.__path__, str(tmp_path)])
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("baselines."):
            del sys.modules[name]


def test_the_methods_of_this_project() -> None:
    assert list(registry()) == sorted(registry())
    assert {"full", "snapkv"} <= registry().keys()
    assert registry()["snapkv"].__module__ == "baselines.snapkv"


def test_a_dropped_in_file_is_found(folder: Path) -> None:
    (folder / "mine.py").write_text(NEW_METHOD.format(name="mine"))
    assert "mine" in discover((pask.methods, baselines))


def test_a_name_that_is_taken(folder: Path) -> None:
    (folder / "mine.py").write_text(NEW_METHOD.format(name="full"))
    with pytest.raises(PaskError, match=r"'full' is taken.*pask\.methods\.full\.FullKV"):
        discover((pask.methods, baselines))


def test_a_file_that_does_not_import(folder: Path) -> None:
    (folder / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(PaskError, match=r"baselines\.broken: .*does not import.*nothing_of_this"):
        discover((pask.methods, baselines))


def test_a_class_without_its_declarations(folder: Path) -> None:
    text = NEW_METHOD.format(name="mine").replace('    color: ClassVar[str] = "#000000"\n', "")
    (folder / "mine.py").write_text(text)
    with pytest.raises(PaskError, match=r"baselines\.mine\.Mine: .*declares no color"):
        discover((pask.methods, baselines))


def test_an_abstract_helper_class_is_not_a_method() -> None:
    module = types.ModuleType("empty")
    module.__path__ = []
    assert discover((module,)) == {}


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(PaskError, match=r"unknown method 'snapvk'; did you mean 'snapkv'\?"):
        method_class("snapvk")
    with pytest.raises(PaskError, match=r"unknown parameter 'windw'; did you mean 'window'\?"):
        make_method("snapkv", 0.33, {"windw": 8})
    with pytest.raises(PaskError, match=r"budget 0\.5 is outside 1\.0\.\.1\.0"):
        make_method("full", 0.5)


def test_a_method_is_its_parameters() -> None:
    assert make_method("snapkv", 0.2, {"window": 8}) == make_method("snapkv", 0.2, {"window": 8})
    assert make_method("snapkv", None) == make_method("snapkv", 0.33)


def test_every_method_is_described_for_tables_and_figures() -> None:
    colors = [method["color"] for method in describe()]
    assert len(set(colors)) == len(colors)
    for method in describe():
        assert method["label"]
        assert method["paper"]
        low, high = method["budgets"]
        assert 0 < low <= high <= 1


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"mine"', '"../mine"', r"name '\.\./mine' is not of a-z, 0-9 and _"),
        ('"mine"', "5", r"name 5 is not of a-z"),
        ('"#000000"', '"nocolor"', r"color 'nocolor' is not like #0072b2"),
        ("= (0.1, 1.0)", "= 0.5", r"budgets 0\.5 is not \(low, high\)"),
        ("def open(", "def opne(", r"declares no open"),
        ("strength: float", "import sys; sys.exit(0); strength: float", r"does not import"),
    ],
)
def test_garbled_declarations_are_one_line(folder: Path, old: str, new: str, expected: str) -> None:
    text = NEW_METHOD.format(name="mine")
    assert old in text
    (folder / "mine.py").write_text(text.replace(old, new, 1))
    with pytest.raises(PaskError, match=rf"baselines\.mine.*{expected}"):
        discover((pask.methods, baselines))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"window": 3.5}, "window must be int, not 3.5"),
        ({"window": "32"}, "window must be int, not '32'"),
        ({"window": True}, "window must be int, not True"),
        ({3: 3}, "unknown parameter 3"),
    ],
)
def test_parameters_of_another_type(params: dict[str, object], expected: str) -> None:
    with pytest.raises(PaskError, match=expected):
        make_method("snapkv", 0.33, params)


def test_what_a_calibration_sets_is_no_parameter_of_a_config() -> None:
    with pytest.raises(PaskError, match=r"'window' is measured.*leave it out"):
        make_method("snapkv", 0.5, {"window": 8}, measured={"window": 4})
    assert make_method("snapkv", 0.5, {}, measured={"window": 4}).window == 4  # type: ignore[attr-defined]
