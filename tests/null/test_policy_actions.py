"""Ladders of levels and what a token costs; the whole package without torch."""

from __future__ import annotations

import subprocess
import sys
from pkgutil import iter_modules

import pytest

import pask.policy
from pask.errors import PaskError
from pask.methods.levels import Level
from pask.policy.actions import Ladder, level_cost, level_named, m, short, token_cost
from tests.null.policy_tables import L2, L4, L8, H, R


def test_a_ladder_reads_and_writes_its_levels() -> None:
    assert Ladder.parse("R,L4,H") == Ladder() == Ladder.parse(" R, L ,H")
    assert Ladder.parse("R,L2,L4,L8,H").actions == (R, L2, L4, L8, H)
    assert str(Ladder.parse("R,L2,L4,L8,H")) == "R,L2,L4,L8,H"
    assert Ladder().upgrades == ((R, L4), (L4, H))
    assert Ladder().above(R) is L4
    assert Ladder().above(L4) is H


@pytest.mark.parametrize(
    "text", ["", "R", "H", "L4,H", "R,L4", "H,L4,R", "R,L4,L4,H", "R,L5,H", "R;H"]
)
def test_what_is_no_ladder_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PaskError, match=r"^no ladder of levels: .*; give levels") as refused:
        Ladder.parse(text)
    assert "\n" not in str(refused.value)


def test_nothing_is_above_high_or_beside_the_ladder() -> None:
    with pytest.raises(ValueError, match="no level above H"):
        Ladder().above(H)
    with pytest.raises(ValueError, match="not in tuple"):
        Ladder().above(L8)


def test_every_level_has_a_short_name_that_is_read_back() -> None:
    names = {level: short(level) for level in Level}
    assert list(names.values()) == ["R", "L2", "L3", "L4", "L8", "H"]
    assert all(level_named(name) is level for level, name in names.items())
    with pytest.raises(PaskError, match=r"unknown level 'L5'.*known: R, L2, L3, L4, L8, H"):
        level_named("L5")


def test_a_level_costs_its_codes_and_a_bit_for_scale_and_zero() -> None:
    costs = [level_cost(level) for level in Level]
    assert costs == [0.0, 3 / 16, 4 / 16, 0.3125, 9 / 16, 1.0]


def test_a_tokens_cost_is_its_levels_by_their_share_of_the_layers() -> None:
    assert m(L4, 8, 32) == 0.078125
    assert m(H, 10, 30) == 1 / 3
    assert m(R, 10, 30) == 0.0
    assert token_cost((H, L4, R), (10, 8, 14)) == (160 + 40) / 512
    assert token_cost((H, H, H), (10, 11, 9)) == 1.0
    with pytest.raises(ValueError, match="zip"):
        token_cost((H,), (1, 1))


def test_the_package_needs_no_torch() -> None:
    modules = [f"pask.policy.{module.name}" for module in iter_modules(pask.policy.__path__)]
    assert len(modules) >= 8
    imports = "; ".join(f"import {name}" for name in modules)
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; {imports}; print(*{{'torch', 'numpy'}} & {{*sys.modules}})",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.split() == []
