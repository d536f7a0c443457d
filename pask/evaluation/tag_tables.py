"""From tagged rows to tables: tokens by tag, by prompt label and by bucket, and one row to draw.

Shares are parts of all answer tokens, or of all prompt tokens; `requests` is the number of rows in
which something occurs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from pask.structure.buckets import all_buckets, bucket_name
from pask.structure.labels import PROTECTED, Label
from pask.structure.tags import RANK, Choice, Next, Phase, Role, Tag

ANSWER_COLUMNS = ("token_class", "role", "phase", "choice", "next", "tokens", "requests", "share")
PROMPT_COLUMNS = ("label", "tokens", "requests", "share", "protected")
BUCKET_COLUMNS = (
    "stage", "bucket", "group", "first_layer", "last_layer", "tokens", "token_layers", "requests",
    "share", "example",
)  # fmt: skip

SHARE_DIGITS = 6
BEFORE, AFTER = 12, 8  # bytes of an example's context

_MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": r"\x7f"}


@dataclass(frozen=True)
class TaggedRow:
    """A request's prompt and a passing answer, token by token: (bytes, label) and (bytes, tag)."""

    id: str
    prompt: tuple[tuple[bytes, Label], ...]
    answer: tuple[tuple[bytes, Tag], ...]


@dataclass
class _Tally:
    tokens: int = 0
    requests: set[str] = field(default_factory=set)
    texts: Counter[bytes] = field(default_factory=Counter)
    contexts: dict[bytes, str] = field(default_factory=dict)

    def example(self) -> str:
        """The most frequent token where it occurs first; of equally frequent ones the earliest."""
        return self.contexts[self.texts.most_common(1)[0][0]] if self.texts else ""


def visible(data: bytes) -> str:
    """Bytes as a reader sees them: marks for line breaks and tabs, \\x.. for parts of letters."""
    text = data.decode(errors="backslashreplace")
    text = "".join(_MARKS.get(character, character) for character in text)
    return re.sub(r"[\x00-\x1f\x80-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _tallies(
    rows: Iterable[TaggedRow], tokens_of: Callable[[TaggedRow], Sequence[tuple[bytes, Any]]],
    name_of: Callable[[Any], Any],
) -> dict[Any, _Tally]:  # fmt: skip
    tallies: dict[Any, _Tally] = {}
    for row in rows:
        tokens = tokens_of(row)
        for at, (text, mark) in enumerate(tokens):
            tally = tallies.setdefault(name_of(mark), _Tally())
            tally.tokens += 1
            tally.requests.add(row.id)
            tally.texts[text] += 1
            if text not in tally.contexts:
                tally.contexts[text] = _context(tokens, at)
    return tallies


def _context(tokens: Sequence[tuple[bytes, Any]], at: int) -> str:
    """The token in brackets, with a little of the text around it."""
    before = b"".join(text for text, _ in tokens[max(at - BEFORE, 0) : at])[-BEFORE:]
    after = b"".join(text for text, _ in tokens[at + 1 : at + 1 + AFTER])[:AFTER]
    left, right = (part.decode(errors="ignore").encode() for part in (before, after))
    return f"{visible(left)}⟦{visible(tokens[at][0])}⟧{visible(right)}"


def _total(tallies: dict[Any, _Tally]) -> int:
    return sum(tally.tokens for tally in tallies.values()) or 1  # no tokens: shares of 0


def answer_table(rows: Sequence[TaggedRow]) -> pd.DataFrame:
    """`ANSWER_COLUMNS`: the exact tags that occur, most consequential first."""
    tallies = _tallies(rows, lambda row: row.answer, lambda tag: tag)
    total = _total(tallies)
    places = [list(kind) for kind in (Phase, Choice, Next)]

    def key(tag: Tag) -> tuple[int, ...]:
        rest = (kinds.index(part) for kinds, part in zip(places, tag[2:], strict=True))
        return RANK[tag.token_class, tag.role], *rest

    records = [
        (*tag, tally.tokens, len(tally.requests), round(tally.tokens / total, SHARE_DIGITS))
        for tag, tally in sorted(tallies.items(), key=lambda item: key(item[0]))
    ]
    return pd.DataFrame(records, columns=list(ANSWER_COLUMNS))


def prompt_table(rows: Sequence[TaggedRow]) -> pd.DataFrame:
    """`PROMPT_COLUMNS`: every label, also those that do not occur, in the order of `Label`."""
    tallies = _tallies(rows, lambda row: row.prompt, lambda label: label)
    total = _total(tallies)
    records = []
    for label in Label:
        tally = tallies.get(label, _Tally())
        share = round(tally.tokens / total, SHARE_DIGITS)
        protected = "yes" if label in PROTECTED else "no"
        records.append((label.value, tally.tokens, len(tally.requests), share, protected))
    return pd.DataFrame(records, columns=list(PROMPT_COLUMNS))


def bucket_table(
    rows: Sequence[TaggedRow], coarsening: str, groups: Sequence[range]
) -> pd.DataFrame:
    """`BUCKET_COLUMNS`: every bucket of the coarsening, then every label, in each layer group.

    `token_layers`: tokens x layers of the group, how many K/V pairs a head stores for them.
    `example`: the bucket's most frequent token, in brackets, in its first context.
    """
    decode = _tallies(rows, lambda row: row.answer, lambda tag: bucket_name(tag, coarsening))
    prompt = _tallies(rows, lambda row: row.prompt, lambda label: label.value)
    records = []
    for stage, tallies, names in (
        ("decode", decode, all_buckets(coarsening)),
        ("prompt", prompt, tuple(label.value for label in Label)),
    ):
        total = _total(tallies)
        for name in names:
            tally = tallies.get(name, _Tally())
            share = round(tally.tokens / total, SHARE_DIGITS)
            requests, shown = len(tally.requests), tally.example()
            for number, group in enumerate(groups):
                slots = tally.tokens * len(group)
                layers = (number, group.start, group.stop - 1)
                records.append((stage, name, *layers, tally.tokens, slots, requests, share, shown))
    return pd.DataFrame(records, columns=list(BUCKET_COLUMNS))


def example(rows: Sequence[TaggedRow]) -> dict[str, Any]:
    """The row that shows most in least space, as JSON: one call with a required and an optional
    value, better one with an enumeration too; among those the shortest prompt."""

    def key(row: TaggedRow) -> tuple[bool, bool, bool, int, str]:
        roles = {tag.role for _, tag in row.answer}
        names = sum(
            tag.role is Role.FUNCTION_SELECTOR and tag.phase in (Phase.OPENING, Phase.WHOLE)
            for _, tag in row.answer
        )
        values = {Role.REQUIRED_VALUE, Role.OPTIONAL_VALUE} <= roles
        return not values, names != 1, Role.ENUM not in roles, len(row.prompt), row.id

    row = min(rows, key=key)
    return {
        "id": row.id,
        "prompt_tokens": [[visible(text), label.value] for text, label in row.prompt],
        "answer_tokens": [[visible(text), *tag] for text, tag in row.answer],
    }
