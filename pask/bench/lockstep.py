"""Whether masks and tags run in lockstep, on random answers under the run's own tokenizer.

Tokens are drawn from xgrammar's masks, for rows of every category in both answer forms. After each
one, the tracker must hold the same bytes and the same end for legal as xgrammar's grammar over
single bytes does, and take and refuse the same tokens as the mask; on a share of the walks every
tag must also be the one that xgrammar's own parser states say. Any difference is a fault of the
harness and stops the run. The time that both sides take is what is compared.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgrammar as xgr
from numpy.typing import NDArray

from pask.bench import Measured
from pask.bfcl.answers import ANSWER_FORMS
from pask.bfcl.data import CATEGORIES, Row, load_rows
from pask.bfcl.grammar import GrammarCompiler
from pask.bfcl.schema import arguments_schema
from pask.bfcl.tag_grammar import LAYOUTS, tag_grammar
from pask.config import RunConfig
from pask.errors import HarnessFault, PaskError
from pask.evaluation.model import load_vocabulary
from pask.structure.automaton import TagGrammar
from pask.structure.byte_vocabulary import STOP, byte_vocabulary
from pask.structure.tags import Tag
from pask.structure.tracker import IllegalBytes, Tracker
from pask.structure.xgrammar_states import Mask, XgrammarTracker

WALKS = 6  # for each row and form
TOKENS = 160  # of a walk, at most
SECOND_WAY = 0.25  # share of the rows whose tags are derived the second way as well
PROBES = 2  # tokens of each kind that are tried at each step, and not taken

# Bytes that end strings, numbers, lists and objects; that begin values inside values; that are no
# plain text. A style says how often a walk draws from each; else it draws from the whole mask.
_ENDING = frozenset(b'"]}0123456789')
_DEEPER = frozenset(b"[{,")
_ODD = frozenset([*range(0x80, 0x100), *b"\\-.eE"])
_STYLES = ((0.5, 0.1, 0.1), (0.2, 0.5, 0.1), (0.3, 0.1, 0.4), (0.7, 0.05, 0.05))


class Subject:
    """One row's grammar in one answer form, compiled for a vocabulary and for single bytes."""

    def __init__(self, row: Row, answer_form: str, walker: Walker, *, second_way: bool) -> None:
        self.where = f"row {row.id}, {answer_form}"
        functions: Sequence[Mapping[str, Any]] = row.functions
        self.compiled = walker.compilers[answer_form].compile_unchecked(functions)
        self.byte_compiled = walker.byte_compilers[answer_form].compile_unchecked(functions)
        self.grammar: TagGrammar = tag_grammar(functions, answer_form)
        self.second: XgrammarTracker | None = None
        if second_way:
            schemas = {function["name"]: arguments_schema(function) for function in functions}
            self.second = XgrammarTracker(schemas, LAYOUTS[answer_form])


@dataclass
class Walker:
    """Draws answers under the masks of one vocabulary, and counts what was compared."""

    info: xgr.TokenizerInfo
    random: random.Random
    tokens: int = 0
    second_way_tokens: int = 0
    probes: int = 0
    ended: int = 0  # walks that came to the end of their answer
    tracker_ns: int = 0
    xgrammar_ns: int = 0
    texts: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = list(self.info.decoded_vocab)
        self._stops = list(self.info.stop_token_ids)
        self._mask, self._byte_mask = Mask(self.info.vocab_size), Mask(STOP + 1)
        self.compilers = {form: GrammarCompiler(self.info, form) for form in ANSWER_FORMS}
        bytes_ = byte_vocabulary()
        self.byte_compilers = {form: GrammarCompiler(bytes_, form) for form in ANSWER_FORMS}
        first: list[list[int]] = [[] for _ in range(256)]
        for token, text in enumerate(self.texts):
            if text and token not in self._stops:
                first[text[0]].append(token)
        self._by_first = [np.array(ids, dtype=np.int64) for ids in first]

    def subject(self, row: Row, answer_form: str, *, second_way: bool = False) -> Subject:
        return Subject(row, answer_form, self, second_way=second_way)

    def walk(self, subject: Subject, limit: int = TOKENS) -> bytes:
        """One random answer, or its first `limit` tokens; HarnessFault at any difference."""
        matcher = xgr.GrammarMatcher(subject.compiled)
        byte_matcher = xgr.GrammarMatcher(subject.byte_compiled)
        tracker, second = Tracker(subject.grammar), subject.second
        if second is not None:
            second.reset()
        style = self.random.choice(_STYLES)
        written = b""
        self._mask.fill(matcher)
        for step in range(limit + 1):
            bits = self._mask.bits
            if found := self._differences(bits, byte_matcher, tracker):
                raise _fault(subject, written, found)
            if tracker.can_end and (not tracker.legal or self.random.random() < 0.5):
                if not matcher.accept_token(self._stops[0]):
                    raise _fault(subject, written, "xgrammar refuses the stop token")
                self.ended += 1
                break
            if step == limit:
                break
            token = self._drawn(bits, tracker.legal, style if 2 * step < limit else (0.9, 0, 0))
            if token is None:
                raise _fault(subject, written, "no token is legal, nor the end")
            text = self.texts[token]
            try:
                tag = self._both(token, matcher, tracker)
                if not byte_matcher.accept_string(text):
                    raise ValueError("its grammar over bytes refuses it")
                if second is not None:
                    if (other := second.accept(text)) != tag:
                        raise ValueError(f"it is {tag}, by xgrammar's states {other}")
                    self.second_way_tokens += 1
            except ValueError as error:
                why = f"at {text!r}, which xgrammar's mask allows: {error}"
                raise _fault(subject, written, why) from error
            self.tokens += 1
            written += text
        return written

    def _both(self, token: int, matcher: xgr.GrammarMatcher, tracker: Tracker) -> Tag:
        """Give the token to both sides, with the clock on them."""
        start = time.perf_counter_ns()
        tag = tracker.accept(self.texts[token])
        between = time.perf_counter_ns()
        accepted = matcher.accept_token(token)
        self._mask.fill(matcher)
        self.xgrammar_ns += time.perf_counter_ns() - between
        self.tracker_ns += between - start
        if not accepted:
            raise ValueError("xgrammar refuses it")
        return tag

    def _differences(
        self, bits: NDArray[np.bool_], byte_matcher: xgr.GrammarMatcher, tracker: Tracker
    ) -> str:
        """What xgrammar and the tracker disagree on here, or nothing."""
        byte_bits = self._byte_mask.read(byte_matcher)
        legal = frozenset(np.flatnonzero(byte_bits[:STOP]).tolist())
        if legal != tracker.legal:
            only = sorted(legal - tracker.legal), sorted(tracker.legal - legal)
            return f"legal bytes of xgrammar alone {only[0]}, of the tracker alone {only[1]}"
        ends = {bool(byte_bits[STOP]), *(bool(bits[stop]) for stop in self._stops)}
        if ends != {tracker.can_end}:
            return f"the tracker says {tracker.can_end} to the end, xgrammar's masks {ends}"
        for token in self._probes(sorted(legal)):
            if tracker_takes(tracker, self.texts[token]) != bits[token]:
                takes = "takes" if bits[token] else "refuses"
                return f"xgrammar {takes} token {token} {self.texts[token]!r}, the tracker not so"
        return ""

    def _probes(self, legal: Sequence[int]) -> list[int]:
        """Tokens to try: of the whole vocabulary, and such as begin with a legal byte."""
        drawn = [self.random.randrange(len(self.texts)) for _ in range(PROBES)]
        for byte in self.random.choices(legal, k=PROBES) if legal else ():
            drawn += self.random.choices(self._by_first[byte], k=min(1, len(self._by_first[byte])))
        tokens = [token for token in drawn if self.texts[token] and token not in self._stops]
        self.probes += len(tokens)
        return tokens

    def _drawn(
        self, bits: NDArray[np.bool_], legal: frozenset[int], style: tuple[float, float, float]
    ) -> int | None:
        """A legal token that does not end the answer, or None; `style`: see _STYLES."""
        if len(legal) > 1:
            chance = self.random.random()
            for share, wanted in zip(style, (_ENDING, _DEEPER, _ODD), strict=True):
                chance -= share
                if chance < 0:
                    ids = self._beginning(bits, sorted(legal & wanted))
                    if len(ids):
                        return int(self.random.choice(ids))
                    break
        else:  # the tokens of one first byte are quickly looked through
            ids = self._beginning(bits, sorted(legal))
            if len(ids):
                return int(self.random.choice(ids))
        ids = np.flatnonzero(bits)
        ids = ids[~np.isin(ids, self._stops)]
        return int(self.random.choice(ids)) if len(ids) else None

    def _beginning(self, bits: NDArray[np.bool_], with_bytes: Sequence[int]) -> NDArray[np.int64]:
        """The legal tokens that begin with one of these bytes, each byte being as likely."""
        if not with_bytes:
            return self._by_first[0][:0]
        ids = self._by_first[self.random.choice(with_bytes)]
        return ids[bits[ids]]


def tracker_takes(tracker: Tracker, text: bytes) -> bool:
    """Whether the tracker could go on with this token; it stays where it is."""
    try:
        tracker.fork().accept(text)
    except IllegalBytes:
        return False
    return True


def measure(config: RunConfig, items: int) -> Measured:
    """Microseconds a token over at least `items` tokens; theirs is xgrammar's accept and mask."""
    if items < 1:
        raise PaskError(f"--items must be at least 1 (token), not {items}")
    rows = load_rows()
    by_category = [[row for row in rows.values() if row.category == name] for name in CATEGORIES]
    walker = Walker(load_vocabulary(config).info, random.Random(config.data.seed))
    for form, group in itertools.cycle(itertools.product(ANSWER_FORMS, by_category)):
        second_way = not walker.second_way_tokens or walker.random.random() < SECOND_WAY
        subject = walker.subject(walker.random.choice(group), form, second_way=second_way)
        for _ in range(WALKS):
            walker.walk(subject)
        if walker.tokens >= items:
            break
    print(
        f"desyncs=0 in {walker.tokens} tokens; {walker.ended} whole answers, {walker.probes} other "
        f"tokens tried, {walker.second_way_tokens} tags derived the second way too",
        file=sys.stderr,
    )
    ours, theirs = (ns / 1e3 / walker.tokens for ns in (walker.tracker_ns, walker.xgrammar_ns))
    unit = "microseconds a token: tagging against xgrammar's accept and mask"
    return Measured(ours, theirs, unit, walker.tokens, less_is_better=True)


def _fault(subject: Subject, written: bytes, why: str) -> HarnessFault:
    return HarnessFault(
        "masks and tags are not in lockstep", where=subject.where, why=f"after {written!r}: {why}"
    )
