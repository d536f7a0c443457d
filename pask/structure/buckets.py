"""Persistence buckets q = (z, c): a token's structural tag, coarsened, with a group of layers.

The paper's Equation 3. An exact tag has too many values to calibrate one by one, so tags are
coarsened to names such as `required_value/free/critical`. A prompt token has no tag: its bucket is
its label (`pask.structure.labels`), in the same layer groups.

| coarsening         | a tag's bucket                             | example                      |
| ------------------ | ------------------------------------------ | ---------------------------- |
| `exact`            | class/role/phase/choice/next               | string/enum/inside/free/near |
| `role_choice_next` | role, free or forced, critical next or not | enum/free/not_critical       |
| `role_choice`      | role, free or forced                       | enum/free                    |
| `role`             | role                                       | enum                         |

In all but `exact` the role `nested` is two, by class: `nested_value` (strings, numbers, booleans,
null) and `nested_structure` (keys and brackets); and `shared` counts as forced, since the grammar
left no choice of the next byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from pask.errors import PaskError, known_names
from pask.structure.tags import CONSEQUENCE, Choice, Next, Phase, Role, Tag, TokenClass

DEFAULT_COARSENING = "role_choice_next"

_STRUCTURE = (TokenClass.KEY, TokenClass.BOUNDARY)


class LayerBucket(NamedTuple):
    """q: the name of a coarsened tag, or a prompt label, and the index of its layer group."""

    name: str
    group: int


def _part(tag: Tag) -> str:
    if tag.role is not Role.NESTED:
        return tag.role.value
    return "nested_structure" if tag.token_class in _STRUCTURE else "nested_value"


def _choice(tag: Tag) -> str:
    return "free" if tag.choice is Choice.FREE else "forced"


def _next(tag: Tag) -> str:
    return "critical" if tag.next is Next.CRITICAL else "not_critical"


_PARTS: dict[str, tuple[Callable[[Tag], str], ...]] = {
    "exact": ("/".join,),
    "role_choice_next": (_part, _choice, _next),
    "role_choice": (_part, _choice),
    "role": (_part,),
}
COARSENINGS = tuple(_PARTS)


def check_coarsening(coarsening: str) -> str:
    """The name itself where it is known, else PaskError."""
    if coarsening not in _PARTS:
        raise PaskError(
            f"unknown coarsening {coarsening!r}", todo=known_names(coarsening, COARSENINGS)
        )
    return coarsening


@cache
def bucket_name(tag: Tag, coarsening: str = DEFAULT_COARSENING) -> str:
    """The bucket of a tag, e.g. `required_value/free/critical`.

    PaskError for an unknown coarsening.
    """
    return "/".join(part(tag) for part in _PARTS[check_coarsening(coarsening)])


@cache
def all_buckets(coarsening: str = DEFAULT_COARSENING) -> tuple[str, ...]:
    """Every bucket that the vocabulary of tags can make, the most consequential role first, then
    free before forced and critical before the rest: a table's rows. PaskError as above.

    A grammar need not reach them all.
    """
    tags = [
        Tag(*pair, phase, choice, next_)
        for pair, phase, choice, next_ in itertools.product(CONSEQUENCE, Phase, Choice, Next)
    ]
    if coarsening != "exact":
        # A role of several classes takes the place of its most consequential one.
        roles = list(dict.fromkeys(_part(tag) for tag in tags))
        choices, nexts = ["free", "forced"], ["critical", "not_critical"]
        tags.sort(
            key=lambda tag: (
                roles.index(_part(tag)),
                choices.index(_choice(tag)),
                nexts.index(_next(tag)),
            )
        )
    return tuple(dict.fromkeys(bucket_name(tag, coarsening) for tag in tags))


def layer_groups(layers: int, groups: int | Sequence[int]) -> tuple[range, ...]:
    """The layers 0..layers-1 in contiguous groups, from the first layer to the last.

    `groups`: how many groups of equal depth (where that does not come out even, the first groups
    have one layer more), or the first layer of each group. PaskError for more groups than layers
    and for first layers that do not begin with 0, rise, and stay below `layers`; ValueError for a
    model without layers.
    """
    if layers < 1:
        raise ValueError(f"a model of {layers} layers has no groups")
    if isinstance(groups, int):
        if not 1 <= groups <= layers:
            raise PaskError(
                f"{groups} groups of {layers} layers",
                where="structure.layer_groups",
                todo=f"ask for 1 to {layers}",
            )
        size, longer = divmod(layers, groups)
        starts = [group * size + min(group, longer) for group in range(groups)]
    else:
        starts = list(groups)
        check_first_layers(starts)
        if starts[-1] >= layers:
            raise PaskError(
                f"layer {starts[-1]} begins a group, the model's last layer is {layers - 1}",
                where="structure.layer_groups",
            )
    return tuple(range(a, b) for a, b in itertools.pairwise([*starts, layers]))


def check_first_layers(starts: Sequence[int]) -> None:
    """PaskError unless these can be the first layers of groups: 0, then rising."""
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise PaskError(
            f"the first layers {list(starts)} do not begin with 0 and rise",
            where="structure.layer_groups",
            todo="give the first layer of each group, e.g. [0, 10, 20]",
        )
