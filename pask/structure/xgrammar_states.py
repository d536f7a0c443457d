"""Structural tags read from xgrammar's own parser: a second way, to check the first against.

xgrammar compiles the text of `pask.structure.role_text`, in which every rule has one role, for a
vocabulary of single bytes. Its matcher is asked, after every byte, which rules its parser is in
and which are yet to begin; everything of a tag follows from that and from the mask. The vocabulary
of tags, the schemas and the text around calls are all that is shared with the tracker, so a mistake
in either walker shows as a difference.

xgrammar prints its parser's items through `GrammarMatcher._debug_print_internal_state`, which is
private and has no promised format: this module is written for xgrammar 0.2.8, a test pins one
known print, and no run depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgrammar as xgr
from numpy.typing import NDArray

from pask.structure.byte_vocabulary import STOP, byte_vocabulary
from pask.structure.call_layout import CallLayout
from pask.structure.role_text import RoleText, Rule
from pask.structure.tags import (
    CHOSEN_ROLES,
    CRITICAL_ROLES,
    NEAR_BYTES,
    RANK,
    Choice,
    Next,
    Role,
    Tag,
    TokenClass,
    tag,
)

_ITEM = re.compile(r"rule_id=(\d+), sequence_id=-?\d+, element_id=(-?\d+)")


class Mask:
    """Room for the mask of a vocabulary of so many ids."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._words = xgr.allocate_token_bitmask(1, vocab_size)
        self._bytes = self._words.numpy().view(np.uint8)[0]

    def fill(self, matcher: xgr.GrammarMatcher) -> None:
        """Take the matcher's mask; what xgrammar itself spends for a step."""
        # It says False, and leaves the room as it was, where every id is legal.
        if not matcher.fill_next_token_bitmask(self._words):
            self._words.fill_(-1)

    @property
    def bits(self) -> NDArray[np.bool_]:
        """[vocab_size]: whether each id is legal."""
        bits = np.unpackbits(self._bytes, count=self._size, bitorder="little")
        return bits.view(np.bool_)

    def read(self, matcher: xgr.GrammarMatcher) -> NDArray[np.bool_]:
        """`fill`, then `bits`."""
        self.fill(matcher)
        return self.bits


@dataclass(frozen=True)
class _Here:
    """The parser after a byte: its rules, each with whether it is yet to begin, and the mask."""

    items: tuple[tuple[Rule, bool], ...]
    legal: frozenset[int]
    can_end: bool

    @property
    def forced(self) -> bool:
        return len(self.legal) == 1 and not self.can_end


class XgrammarTracker:
    """Tags as `Tracker` gives them, at about ten times its cost.

    `functions`: name -> JSON Schema of its arguments object, as for `CallGrammar`. Compiling takes
    milliseconds; `reset` starts another answer.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], layout: CallLayout) -> None:
        text = RoleText(functions, layout)
        compiler = xgr.GrammarCompiler(byte_vocabulary(), max_threads=1)
        compiled = compiler.compile_grammar(str(text))
        names = [line.split(" ::= ")[0] for line in str(compiled.grammar).splitlines() if line]
        # xgrammar numbers its rules in the order in which it prints them. Were there others than
        # ours, made by its own rewriting, the look-up would fail.
        self._rules = [text.rules[name] for name in names]
        self._starts: dict[str, str] = {}
        self._matcher = xgr.GrammarMatcher(compiled)
        self._mask = Mask(STOP + 1)
        self.reset()

    def reset(self) -> None:
        """Back to the start of an answer."""
        self._matcher.reset()
        self._position = 0
        # Where the forced bytes ahead lead, as far as they have been followed, and to what.
        self._frontier, self._critical = -1, False
        self._here = self._look()

    @property
    def legal(self) -> frozenset[int]:
        """The bytes that may follow."""
        return self._here.legal

    @property
    def can_end(self) -> bool:
        """Whether the answer may end here."""
        return self._here.can_end

    def accept(self, token: bytes) -> Tag:
        """Take the bytes of one token and give its tag; ValueError where they are not legal, or
        none, and nothing changes then."""
        if not token:
            raise ValueError("a token without bytes has no place in the grammar")
        here, best, opens, closes = self._here, len(RANK), False, False
        shared = free = False
        for at, byte in enumerate(token):
            if byte not in here.legal:
                if at:
                    self._matcher.rollback(at)
                raise ValueError(f"byte {at} of {token!r} is not legal here")
            free = free or not here.forced
            self._step(byte)
            after = self._look()
            rank, byte_opens, byte_closes, byte_shared = _read(here, byte, after)
            if rank < best:
                best, opens, closes, shared = rank, byte_opens, byte_closes, byte_shared
            elif rank == best:
                opens, closes = opens or byte_opens, closes or byte_closes
                shared = byte_shared
            here = after
        self._here = here
        self._position += len(token)
        choice = Choice.FREE if free else Choice.SHARED if shared else Choice.FORCED
        return tag(best, opens, closes, choice, self._next())

    def _step(self, byte: int) -> None:
        if not self._matcher.accept_string(bytes([byte])):
            raise RuntimeError(f"xgrammar refuses byte {byte}, which its mask allows")

    def _look(self) -> _Here:
        bits = self._mask.read(self._matcher)
        legal = np.flatnonzero(bits[:STOP]).tolist()
        printed = self._matcher._debug_print_internal_state()
        # An element is a state of a rule; where a rule is seen first, it is yet to begin. (The
        # print's rule_start_pos does not say so: a rule in last place takes over its caller's.)
        items = {
            (self._rules[int(rule)], self._starts.setdefault(rule, element) == element)
            for rule, element in _ITEM.findall(printed)
        }
        return _Here(tuple(items), frozenset(legal), bool(bits[STOP]))

    def _next(self) -> Next:
        """From where the matcher is now."""
        if self._frontier < self._position:
            self._follow()
        if not self._critical:
            return Next.END
        bytes_ahead = self._frontier - self._position
        if not bytes_ahead:
            return Next.CRITICAL
        return Next.NEAR if bytes_ahead <= NEAR_BYTES else Next.FAR

    def _follow(self) -> None:
        """Along the forced bytes to the first state with a choice or an end, and back."""
        here, bytes_ahead = self._here, 0
        while here.forced:
            self._step(*here.legal)
            bytes_ahead += 1
            here = self._look()
        if bytes_ahead:
            self._matcher.rollback(bytes_ahead)
        self._frontier = self._position + bytes_ahead
        self._critical = any(rule.role in CRITICAL_ROLES for rule, _ in here.items)


def _read(here: _Here, byte: int, after: _Here) -> tuple[int, bool, bool, bool]:
    """(rank, opens, closes, shared) of the byte, from the states before and after it."""
    going = [rule for rule, fresh in after.items if rule.inner or not fresh]
    ended = len(going) < len(after.items) or not after.items
    kept = {rule.alternative for rule in going}
    left = [rule for rule, _ in here.items if rule.alternative not in kept]
    if going:
        takers, alternatives = going, len(kept)
        # An integer of an enumeration may end where a longer one goes on.
        if ended and any(rule.role is Role.ENUM for rule in left) and going[0].role is Role.ENUM:
            alternatives += 1
    else:
        takers, alternatives = _ending(left, byte, after), 1
    best = min(takers, key=lambda rule: rule.rank)
    if best.token_class is TokenClass.BOUNDARY and best.opens is None:
        opens, closes = byte in b"[{", byte in b"]}"
    elif best.opens is not None:
        opens, closes = best.opens, bool(best.closes)
    else:
        begun = {rule.alternative for rule, fresh in here.items if fresh and not rule.inner}
        opens, closes = any(rule.alternative in begun for rule in takers), not going
    return best.rank, opens, closes, alternatives > 1 and best.role in CHOSEN_ROLES


def _ending(rules: list[Rule], byte: int, after: _Here) -> list[Rule]:
    """Those of the rules that the byte can have ended."""
    over = not after.items  # one byte may end the answer where another asks for one more call
    rules = [rule for rule in rules if (rule.alternative == "end") == over] or rules
    keys = {rule.after for rule, _ in after.items if rule.after}
    if keys:
        return [rule for rule in rules if rule.alternative in keys]
    marks = [rule for rule in rules if rule.token_class is TokenClass.BOUNDARY]
    others = [rule for rule in rules if rule.token_class is not TokenClass.BOUNDARY]
    # Where a number, an item or a key could stand instead, the mark tells them apart.
    return marks if marks and (byte in b",[]{}\n" or not others) else others
