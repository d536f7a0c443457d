"""Transactional Attention: tokens beside a structural anchor ("key:", "password:") are protected.

Source: Basu 2026, "Transactional Attention", arXiv 2604.11288. A fixed budget of K tokens; values
that attention neglects until they are needed (credentials, settings) are sponsored by the anchor
before them and so survive eviction. `transattn` evicts by accumulated attention, `transattn_fast`
by age alone and captures nothing.

What stays, at the prompt's end and after every decode step: the first S tokens, the last R tokens,
at most rho K sponsored ones between them, and for the rest those with the highest base score: the
softmax probabilities of all queries so far, mean over the query heads of a kv head (`transattn`),
or the position (`transattn_fast`).

Deviations and open choices. The abstract names the mechanism, two anchors, the fixed budget and
the attention-free variant; everything below is inferred:
- anchors are found in the text, not in token ids. `generic`: an identifier or a quoted key before
  ":" or "=", and the words key, token, password, id, secret, url and path, alone or as the last
  part of an identifier. `schema`: the keys name, required, enum, type and default, and, as the
  names of parameters, the keys whose value is an object, `SCHEMA_WORDS` apart;
- an anchor sponsors its own tokens and those of the value behind it up to a comma, a closing
  bracket or a newline, at most `value_span` (8); in `schema` a list counts to its end, and a
  parameter's name sponsors itself alone. A token counts as soon as one of its bytes does;
- `sponsor_share` rho is 0.5 of K; sponsored tokens among the first S and the last R are protected
  anyway and do not count. Where more are sponsored, the highest base scores stay sponsored, the
  later of two equals; the others compete like any token. With `transattn` each layer settles that
  by its own scores, summed over its heads, for a later layer's are not known yet. So sponsored
  tokens are the same in all heads of a layer, and in all layers until rho K binds;
- decoded text goes on where the prompt's ends. A token becomes sponsored when it leaves the last R;
  an anchor's own tokens that left before the anchor was complete do at once, in the layers whose
  heads all hold them yet. Beyond rho K a new one displaces the lowest base score of the others;
- a sponsored token is protected, which stands for a boost of its score; no learned anchors and no
  allow-list;
- `sinks` S = 4; R = K / 8 (`recent_share`), at least `recent_min` (8). A small K leaves at most a
  quarter to the sinks and half to the last tokens (note "window"); rho K is cut to what is left
  (note "sponsors");
- a key is looked for at most 72 bytes back from its separator;
- the attention sums (fp32, 4 bytes a token and kv head) are bookkeeping and not counted as KV;
- K = round(B (P + T + s) - s): P prompt tokens, T expected answer tokens, s free slots in a last
  page on average (half of it less one); at B = 1 nothing is dropped. A K below `min_tokens` is
  raised to it, which exceeds the budget (note "unreachable");
- one kept set per kv head; original positions; equal scores: the later token stays.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from pask.methods.contract import (
    UNREACHABLE,
    Captures,
    Decoded,
    Method,
    Placement,
    PromptInfo,
    RequestState,
    Wants,
)
from pask.methods.full import FullKV
from pask.methods.selection import bounded, by_kv_head, top

ANCHORS = ("generic", "schema")

SCHEMA_KEYS = frozenset((b"name", b"required", b"enum", b"type", b"default"))
"""Keys of a function's schema whose values are sponsored."""

SCHEMA_WORDS = frozenset((b"parameters", b"properties", b"items", b"function", b"arguments"))
"""Keys of a schema that hold an object and are no parameter's name."""

_WAY_BACK = 72
"""Bytes before a separator among which its key is looked for."""

_LETTERS = bytes((*b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_", *range(128, 256)))
_IDENTIFIER = _LETTERS + b"0123456789.-"
_SEPARATOR = re.compile(rb"[:=]")
_OPENED_OBJECT = re.compile(rb":\s*\{")
_WORD = re.compile(
    rb"(?<![A-Za-z0-9])(?:key|token|password|id|secret|url|path)(?=[^A-Za-z0-9_])", re.IGNORECASE
)
_VALUE_END = re.compile(rb"[,)\]}\n]")
_LIST_END = re.compile(rb"\]")


class Anchor(NamedTuple):
    """Bytes start .. end of a text; `has_value`: what follows is sponsored too."""

    start: int
    end: int
    has_value: bool = True


def _key_before(text: bytearray, end: int) -> tuple[int, bytes] | None:
    """The quoted key or the identifier that ends right before `end`: where it starts, its name."""
    first = max(0, end - _WAY_BACK)
    head = bytes(text[first:end]).rstrip(b" \t")
    quote = head[-1:]
    if quote in (b'"', b"'"):
        start, name = head.rfind(quote, 0, -1), head[head.rfind(quote, 0, -1) + 1 : -1]
        return (first + start, name) if start >= 0 and name and b"\n" not in name else None
    name = head[len(head.rstrip(_IDENTIFIER)) :]
    return (first + len(head) - len(name), name) if name and name[0] in _LETTERS else None


class AnchorText:
    """A text that grows token by token, and the tokens that its anchors sponsor."""

    def __init__(self, anchors: str, value_span: int) -> None:
        self._schema, self._span = anchors == "schema", value_span
        self._text = bytearray()
        self._starts: list[int] = []
        # Of the value that runs: tokens that it may still sponsor, whether it shows, what ends it.
        self._left, self._begun, self._value_end = 0, False, _VALUE_END

    @property
    def tokens(self) -> int:
        return len(self._starts)

    def add(self, token: bytes) -> list[int]:
        """Take the next token; which ones are now known to be sponsored, itself perhaps."""
        text, here, value_from = self._text, len(self._starts), len(self._text)
        self._starts.append(value_from)
        text += token
        found: set[int] = set()
        for start, end, has_value in self._anchors(value_from):
            found.update(range(self._token_at(start), self._token_at(end - 1) + 1))
            if has_value:
                value_from = max(value_from, end)
                self._left, self._begun = self._span, False
        if not self._left or value_from == len(text):
            return sorted(found)
        opening = text[value_from:].lstrip(b" \t")[:1]
        if not self._begun and opening:
            self._begun = True
            self._value_end = _LIST_END if self._schema and opening == b"[" else _VALUE_END
        stop = self._value_end.search(text, value_from) if self._begun else None
        if here not in found and (stop is None or stop.start() > value_from):
            found.add(here)
            self._left -= 1
        if stop:
            self._left = 0
        return sorted(found)

    def _anchors(self, fresh: int) -> list[Anchor]:
        """Those that are known since the bytes from `fresh` on are there."""
        text, found = self._text, []
        for match in _SEPARATOR.finditer(text, fresh):
            key = _key_before(text, match.start())
            if key and (key[1] in SCHEMA_KEYS or not self._schema):
                found.append(Anchor(key[0], match.end()))
        if self._schema:
            for match in _OPENED_OBJECT.finditer(text, max(0, fresh - _WAY_BACK)):
                key = _key_before(text, match.start())
                if match.end() > fresh and key and key[1] not in SCHEMA_WORDS:
                    found.append(Anchor(key[0], match.start(), has_value=False))
        else:
            for match in _WORD.finditer(text, max(0, fresh - _WAY_BACK)):
                if match.end() >= fresh:  # the byte behind it is new
                    key = _key_before(text, match.end())
                    found.append(Anchor(key[0] if key else match.start(), match.end()))
        return sorted(found)

    def _token_at(self, byte: int) -> int:
        return bisect_right(self._starts, byte) - 1


@dataclass(frozen=True)
class TransAttn(Method):
    """`anchors` is `generic` or `schema`; the other fields are explained above."""

    budget: float = 0.33
    anchors: str = "generic"
    value_span: int = 8
    sponsor_share: float = 0.5
    sinks: int = 4
    recent_share: float = 0.125
    recent_min: int = 8
    min_tokens: int = 8

    name: ClassVar[str] = "transattn"
    label: ClassVar[str] = "TransAttn"
    paper: ClassVar[str] = "Basu 2026, arXiv 2604.11288"
    color: ClassVar[str] = "#e69f00"
    marker: ClassVar[str] = "P"
    knob: ClassVar[str] = "tokens kept per layer and kv head, of prompt and answer"
    budgets: ClassVar[tuple[float, float]] = (0.05, 1.0)

    by_attention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors not in ANCHORS:
            raise ValueError(f"{self.name}: anchors must be one of {ANCHORS}, not {self.anchors!r}")
        for field in ("sponsor_share", "recent_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{self.name}: {field} must be within 0..1")
        for field, least in {"value_span": 0, "sinks": 0, "recent_min": 1, "min_tokens": 1}.items():
            if getattr(self, field) < least:
                raise ValueError(f"{self.name}: {field} must be at least {least}")

    def wanted(self, info: PromptInfo) -> int:
        """Tokens to keep so that B_persist meets the budget at the expected length."""
        return bounded(self.setting, info)

    def open(self, info: PromptInfo) -> RequestState:
        if self.setting >= 1:
            return FullKV().open(info)
        return _TransAttnRequest(self, info)


@dataclass(frozen=True)
class TransAttnFast(TransAttn):
    """The same without attention: the base score of a token is its position."""

    name: ClassVar[str] = "transattn_fast"
    label: ClassVar[str] = "TransAttn-Fast"
    color: ClassVar[str] = "#a6761d"
    marker: ClassVar[str] = "p"

    by_attention: ClassVar[bool] = False


class _TransAttnRequest(RequestState):
    evicts = True

    def __init__(self, method: TransAttn, info: PromptInfo) -> None:
        if info.texts is None or len(info.texts) != info.prompt_tokens:
            raise ValueError(f"{method.name}: anchors need the text of each prompt token")
        self.info, self.by_attention = info, method.by_attention
        self.wants = Wants(prompt_mass=True, step_mass=True) if self.by_attention else Wants()
        wanted = method.wanted(info)
        self.capacity = capacity = max(wanted, method.min_tokens)
        window = max(int(capacity * method.recent_share), method.recent_min)
        self.sinks = min(method.sinks, capacity // 4)
        self.window = min(window, max(1, capacity // 2))
        room = capacity - self.sinks - self.window
        self.most_sponsored = min(int(capacity * method.sponsor_share), room)
        clamped = (self.sinks, self.window) != (method.sinks, window)
        cut = self.most_sponsored < int(capacity * method.sponsor_share)
        self.notes = (
            (UNREACHABLE,) * (wanted < capacity) + ("window",) * clamped + ("sponsors",) * cut
        )

        self._held = min(capacity, info.prompt_tokens)
        self._text = AnchorText(method.anchors, method.value_span)
        found = {token for text in info.texts for token in self._text.add(text)}
        self._decoded: list[bytes] = []
        # Without attention all layers and heads drop alike: one row stands for them.
        rows = (info.layers, info.kv_heads) if self.by_attention else (1, 1)
        size = info.prompt_tokens + info.expected_new_tokens
        self._scores = torch.zeros(*rows, size)  # infinite where a token was dropped
        self._guard = torch.zeros(rows[0], 1, size)  # infinite where a token is sponsored
        self._sponsored = torch.zeros(rows[0], dtype=torch.int64)
        left = {token for token in found if token < info.prompt_tokens - self.window}
        self._prompt_sponsors = torch.tensor(sorted(t for t in left if t >= self.sinks)).long()
        self._in_window = found - left

    def place(self, layer: int, captures: Captures) -> Placement:
        prompt, row = self.info.prompt_tokens, layer if self.by_attention else 0
        if self.by_attention:
            assert captures.prompt_mass is not None  # it was asked for
            scores = by_kv_head(captures.prompt_mass, self.info)
        else:
            scores = torch.arange(prompt, dtype=torch.float32)[None]
        sponsors = self._prompt_sponsors
        if len(sponsors) > self.most_sponsored:
            sponsors = sponsors[top(scores.sum(dim=0)[sponsors], self.most_sponsored)]
        self._guard[row, 0, sponsors] = torch.inf
        self._sponsored[row] = len(sponsors)
        self._scores[row, :, :prompt] = scores
        if self._held == prompt:
            return Placement()
        ranked = scores + self._guard[row, :, :prompt]
        ranked[:, : self.sinks] = torch.inf
        ranked[:, prompt - self.window :] = torch.inf
        kept = top(ranked, self.capacity)
        self._scores[row, :, :prompt] = torch.full_like(scores, torch.inf).scatter(
            1, kept, scores.gather(1, kept)
        )
        return Placement.high(kept.expand(self.info.kv_heads, -1))

    def accepted(self, decoded: Decoded) -> None:
        """Told of each decoded token, in order, before it is fed."""
        self._decoded.append(decoded.text)

    def evict(self, tokens: int, mass: torch.Tensor | None) -> torch.Tensor | None:
        if tokens > self._scores.shape[-1]:
            more = (0, max(64, tokens // 2))
            self._scores, self._guard = F.pad(self._scores, more), F.pad(self._guard, more)
        scores = self._scores[:, :, :tokens]
        if self.by_attention:
            assert mass is not None  # it was asked for
            scores.add_(mass, alpha=1 / self.info.group_size)
        else:
            scores[:, :, -1] = tokens - 1
        self._sponsor(tokens)
        self._held += 1
        if self._held <= self.capacity:
            return None
        older = slice(self.sinks, tokens - self.window)
        # Of equal values argmin names the first.
        ranked = scores[:, :, older] + self._guard[:, :, older]
        dropped = self.sinks + ranked.argmin(dim=-1, keepdim=True)
        scores.scatter_(2, dropped, torch.inf)
        self._held -= 1
        return dropped.expand(self.info.layers, self.info.kv_heads, 1)

    def _sponsor(self, tokens: int) -> None:
        """Sponsor what has left the last tokens, and displace what is then too much."""
        told = self._decoded[self._text.tokens - self.info.prompt_tokens :]
        for text in told[: tokens - self._text.tokens]:
            self._in_window.update(self._text.add(text))
        for new in sorted(t for t in self._in_window if t < tokens - self.window):
            self._in_window.remove(new)
            if new < self.sinks or not self.most_sponsored:
                continue
            guard = self._guard[:, 0, :tokens]
            held = self._scores[:, :, new].isfinite().all(dim=1) & (guard[:, new] == 0)
            self._sponsored += held
            full = self._sponsored > self.most_sponsored
            if full.any():
                others = self._scores[:, :, :tokens].sum(dim=1)
                least = others.masked_fill(guard == 0, torch.inf).argmin(dim=1)
                guard[full, least[full]] = 0
                self._sponsored[full] -= 1
            guard[held, new] = torch.inf
