"""TransAttn against worked examples, a slow literal second form and a dense decoder with masks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.h2o import H2O
from baselines.sinks_recent import SinksRecent
from baselines.transattn import AnchorText, TransAttn, TransAttnFast
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.loading import load_model
from pask.methods.contract import UNREACHABLE, Decoded, Method, PromptInfo, Wants
from pask.methods.full import FullKV
from tests.cpu.evictions import DenseDecoder, Driven, Held, Rows, same_as_rules
from tests.cpu.tiny import tiny_folder, tiny_tokenizer
from tests.cpu.toys import toy_requests

METHODS = (TransAttn, TransAttnFast)
SMALL: dict[str, Any] = {"sinks": 1, "recent_min": 2, "recent_share": 0.0, "min_tokens": 1}


def info(
    texts: Sequence[bytes], *, layers: int = 1, kv_heads: int = 1, group: int = 1, expected: int = 0
) -> PromptInfo:
    return PromptInfo(len(texts), layers, kv_heads, group, 8, expected, texts=texts)


def sponsored(tokens: Sequence[bytes], anchors: str = "generic", value_span: int = 8) -> set[int]:
    text = AnchorText(anchors, value_span)
    return {found for token in tokens for found in text.add(token)}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("The| city|:| Paris| is|,| nice", {1, 2, 3, 4}),
        ('{"|name|":| "|get|",| "|n|": |5|}', set(range(10))),  # a token that holds both counts
        ("x|=| 1| 2| 3| 4| 5| 6| 7| 8| 9", set(range(10))),  # the key and eight of the value
        ("What| is| the| weather|?", set()),
        ("the| password| is| x9|\n|bye", {1, 2, 3}),
        ("pathology|,| monkey| tokens| idea|,| key_value| x", set()),
        ("my| api|_|key| abc|)| z", {1, 2, 3, 4}),
        ("at |12|:|30", set()),
        ("'two words'| =| v|\n", {0, 1, 2}),
        ("a| token", set()),  # tokenizer, perhaps
        ("Zü|rich|:| 1|;", {0, 1, 2, 3, 4}),
    ],
)
def test_generic_anchors(tokens: str, expected: set[int]) -> None:
    assert sponsored(tokens.encode().split(b"|")) == expected


def test_schema_anchors() -> None:
    schema = (
        '{"name": "find", "description": "Key: it", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required" : ["city"]}, "key": 1}'
    )
    tokens = re.findall(rb"\w+|\W", schema.encode())
    found = sponsored(tokens, "schema")
    runs = b"".join(t if n in found else b"|" for n, t in enumerate(tokens))
    assert [run for run in re.split(rb"\|+", runs) if run] == [
        b'"name": "find"',
        b'"type": "object"',
        b'"city"',
        b'"type": "string"',
        b'"enum": ["Rome", "',  # eight tokens of the value
        b'"required" : ["city"',
    ]


def test_a_list_is_one_value_in_a_schema_alone() -> None:
    tokens = b'"enum"|:| |["|a|", "|b|"]|,| c'.split(b"|")
    assert sponsored(tokens, "schema") == set(range(8))
    assert sponsored(tokens, "generic") == set(range(6))


def literal_anchors(text: bytes) -> set[tuple[int, int]]:
    """Start and end of each generic anchor, by looking back from every separator."""
    letter, inside = rb"[A-Za-z_\x80-\xff]", rb"[A-Za-z0-9_.\-\x80-\xff]"
    name = rb"(?<!" + inside + rb")" + letter + inside + rb"*"
    key = re.compile(rb"(?:\"[^\"\n]+\"|'[^'\n]+'|" + name + rb")[ \t]*\Z")
    found = set()
    for at in range(len(text)):
        if text[at] in b":=" and (match := key.search(text[:at])):
            found.add((match.start(), at + 1))
    for word in (b"key", b"token", b"password", b"id", b"secret", b"url", b"path"):
        for at in range(len(text) - len(word)):
            end = at + len(word)
            if text[at:end].lower() != word or re.match(rb"[A-Za-z0-9_]", text[end:]):
                continue
            if at and re.match(rb"[A-Za-z0-9]", text[at - 1 : at]):
                continue
            whole = re.search(name + rb"\Z", text[:end])
            found.add((whole.start() if whole else at, end))
    return found


class LiteralText:
    """The sponsored tokens by definition, all over again for each length of the text."""

    def __init__(self, value_span: int) -> None:
        self.span, self.tokens, self.known = value_span, list[bytes](), set[tuple[int, int]]()

    def add(self, token: bytes) -> set[int]:
        """Tokens of anchors that are complete now, and the new one where it is a value's."""
        self.tokens.append(token)
        text = b"".join(self.tokens)
        owner = [n for n, token in enumerate(self.tokens) for _ in token]
        anchors, values = literal_anchors(text), set()
        for start, end in anchors:
            value = list[int]()
            for at in range(end, len(text)):
                if text[at] in b",)]}\n":
                    break
                if owner[at] not in (*owner[start:end], *value) and len(value) < self.span:
                    value.append(owner[at])
            values.update(value)
        found = {n for start, end in anchors - self.known for n in owner[start:end]}
        self.known = anchors
        return found | (values & {len(self.tokens) - 1})


PIECES = st.sampled_from(
    b'a|b2| id|key|_| |"|\'|":|:|=| = |,|]|\n|x.y|9|pass|word| URL|(|",|token|-|\xc3|k: v'.split(
        b"|"
    )
)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(PIECES, max_size=24), value_span=st.sampled_from([0, 1, 2, 8]))
def test_anchors_equal_the_literal_form(tokens: list[bytes], value_span: int) -> None:
    text, literal = AnchorText("generic", value_span), LiteralText(value_span)
    for token in tokens:
        assert set(text.add(token)) == literal.add(token)


def test_shares_of_the_worked_example() -> None:
    about = PromptInfo(600, 2, 1, 1, 8, 60, texts=[b"x"] * 600)
    state: Any = TransAttn(budget=0.33).open(about)
    assert (state.capacity, state.sinks, state.window) == (218, 4, 27)
    assert (state.most_sponsored, state.notes) == (109, ())


@pytest.mark.parametrize(
    ("capacity", "sinks", "window", "sponsored", "notes"),
    [
        (32, 4, 8, 16, ()),
        (16, 4, 8, 4, ("sponsors",)),
        (12, 3, 6, 3, ("window", "sponsors")),
        (8, 2, 4, 2, ("window", "sponsors")),
    ],
)
def test_shares_of_a_small_budget(
    capacity: int, sinks: int, window: int, sponsored: int, notes: tuple[str, ...]
) -> None:
    state: Any = TransAttn(budget=0.5).open(info([b"x"] * 2 * capacity))
    assert (state.capacity, state.sinks, state.window) == (capacity, sinks, window)
    assert (state.most_sponsored, state.notes) == (sponsored, notes)


def test_fast_by_hand() -> None:
    # Eight tokens stay: the first, the last two, at most two sponsored, the rest by age.
    method = TransAttnFast(budget=0.5, sponsor_share=0.25, value_span=1, **SMALL)
    about = info([b"a ", b"b", b"=", b"1", b",", b"c ", b"d ", b"e "], expected=8)
    state = Driven(method.open(about), about)
    state.place([torch.empty(0)])
    assert state.held == [[set(range(8))]]  # sponsored: 2 and 3, the later ones of 1, 2 and 3

    def step(text: bytes) -> int:
        dropped = state.step(torch.zeros(1, 1, state.tokens + 1), text)
        assert dropped is not None
        return int(dropped.item())

    assert [step(b"f "), step(b"k"), step(b"=")] == [1, 4, 5]
    assert step(b"7") == 2  # token 9, "k", is sponsored now and displaces 2
    assert step(b"g ") == 3  # token 10, "=", displaces 3
    assert step(b"h ") == 6  # token 11, "7", displaces 9, which is younger than 6
    assert state.held == [[{0, 7, 8, 9, 10, 11, 12, 13}]]


def test_too_many_sponsors_are_settled_by_each_layer_for_all_its_heads() -> None:
    # Six tokens stay: the first, the last two, at most two sponsored and one by its score.
    method = TransAttn(budget=0.75, sponsor_share=0.34, value_span=1, **SMALL)
    texts = [b"a ", b"b", b"=", b"1", b",", b"c ", b"d ", b"e "]
    about = info(texts, layers=2, kv_heads=2)
    state = Driven(method.open(about), about)
    state.place(
        [
            # 1, 2, 3 over both heads: 0.5, 0.25, 0.25
            torch.tensor([[9, 0.5, 0, 0.25, 0.75, 0.5, 0, 0], [9, 0, 0.25, 0, 0.5, 0.625, 0, 0]]),
            # 0.25, 1.0, 0.5
            torch.tensor([[9, 0.25, 0.5, 0, 0.125, 0, 0, 0], [9, 0, 0.5, 0.5, 0.25, 0.5, 0, 0]]),
        ]
    )
    assert state.held[0] == [{0, 1, 3, 4, 6, 7}, {0, 1, 3, 5, 6, 7}]
    assert state.held[1] == [{0, 2, 3, 1, 6, 7}, {0, 2, 3, 5, 6, 7}]


def test_an_anchor_that_is_complete_late_sponsors_what_all_heads_still_hold() -> None:
    # Six tokens stay: the first, the last two and three others.
    method = TransAttn(budget=0.5, **SMALL)
    texts = [b"s ", b"t ", b"u ", b"aa", b"bb", b"cc"]
    about = info(texts, kv_heads=2, expected=6)
    state = Driven(method.open(about), about)
    state.place([torch.tensor([[9, 5, 5, 0.5, 4, 4], [9, 0.5, 3, 2, 4, 4]])])
    state.step(torch.zeros(1, 2, 7), b"dd")
    assert state.held == [[{0, 1, 2, 4, 5, 6}, {0, 2, 3, 4, 5, 6}]]
    # "aabbccdd:" begins at token 3, which is gone in one head: tokens 4 and 5 are sponsored.
    state.step(torch.zeros(1, 2, 8), b":")
    assert state.held == [[{0, 2, 4, 5, 6, 7}, {0, 2, 4, 5, 6, 7}]]


@pytest.mark.parametrize("method", METHODS)
def test_a_planted_value_survives_where_the_base_drops_it(method: type[TransAttn]) -> None:
    words = [b" word"] * 64
    words[20:26] = [b" key", b":", b" s3", b"cr", b"et", b"\n"]
    planted = {20, 21, 22, 23, 24}
    about = info(words)
    masses = torch.arange(64.0, 128.0)[None]
    masses[0, 20:26] = 0.0  # nobody looks there
    for chosen, stays in ((method(budget=0.5), True), (H2O(budget=0.5), False)):
        state = Driven(chosen.open(about), about)
        state.place([masses])
        for _ in range(40):
            state.step(torch.ones(1, 1, state.tokens + 1), b" more")
        assert len(state.held[0][0]) == 32
        assert planted <= state.held[0][0] if stays else not planted & state.held[0][0]


@pytest.mark.parametrize("fields", [{}, {"sponsor_share": 0.0}])
@pytest.mark.parametrize(
    ("method", "base"),
    [
        (TransAttn, H2O(budget=0.5, sinks=4, heavy_share=0.875)),
        (TransAttnFast, SinksRecent(budget=0.5, sinks=4)),
    ],
)
def test_without_sponsors_it_is_its_base(
    method: type[TransAttn], base: Method, fields: dict[str, Any]
) -> None:
    text = b"key: 5, " if fields else b" word"
    about = info([text] * 128, layers=2, kv_heads=2, group=2)  # 64 stay: 4 sinks, the last 8
    draw = torch.Generator().manual_seed(7)
    masses = [torch.rand(4, 128, generator=draw) for _ in range(2)]
    states = [Driven(m.open(about), about) for m in (method(budget=0.5, **fields), base)]
    for state in states:
        state.place(masses)
    for number in range(30):
        mass = torch.rand(2, 2, 129 + number, generator=draw)
        for state in states:
            state.step(mass, text)
        assert states[0].held == states[1].held


class LiteralTransAttn:
    """One layer once more, with sets and sorted lists."""

    def __init__(self, method: TransAttn, about: PromptInfo, text: LiteralText) -> None:
        self.method, self.tokens, self.text = method, about.prompt_tokens, text
        self.total = about.prompt_tokens + about.expected_new_tokens
        self.capacity = capacity = max(round(method.budget * self.total), method.min_tokens)
        self.sinks = min(method.sinks, capacity // 4)
        window = max(int(capacity * method.recent_share), method.recent_min)
        self.window = min(window, max(1, capacity // 2))
        self.most = int(capacity * method.sponsor_share)
        self.most = min(self.most, capacity - self.sinks - self.window)
        self.scores: list[dict[int, Fraction]] = []
        self.found: set[int] = set()
        self.sponsored: list[int] = []
        for token in about.texts or ():
            self.found |= text.add(token)

    def prompt(self, mass: Rows) -> Held:
        self.scores = [dict(enumerate(map(self.base, row, range(len(row))))) for row in mass]
        older = [n for n in self.found if n < self.tokens - self.window]
        self.found -= set(older)
        ranked = sorted((n for n in older if n >= self.sinks), key=self.over_heads)
        self.sponsored = ranked[len(ranked) - self.most :] if len(ranked) > self.most else ranked
        return self.cut()

    def step(self, mass: Rows, token: bytes) -> Held:
        self.tokens += 1
        for scores, row in zip(self.scores, mass, strict=True):
            scores[self.tokens - 1] = self.base(Fraction(0), self.tokens - 1)
            if self.method.by_attention:
                for n in scores:
                    scores[n] += row[n]
        self.found |= self.text.add(token)
        for n in sorted(n for n in self.found if n < self.tokens - self.window):
            self.found.remove(n)
            held = all(n in scores for scores in self.scores)
            if n < self.sinks or not self.most or not held or n in self.sponsored:
                continue
            if len(self.sponsored) == self.most:
                self.sponsored.remove(min(self.sponsored, key=self.over_heads))
            self.sponsored.append(n)
        return self.cut()

    def cut(self) -> Held:
        for scores in self.scores:
            free = [n for n in scores if self.sinks <= n < self.tokens - self.window]
            free = [n for n in free if n not in self.sponsored]
            free.sort(key=lambda n: (scores[n], n))
            while len(scores) > self.capacity:
                del scores[free.pop(0)]
        return [set(scores) for scores in self.scores]

    def base(self, mass: Fraction, token: int) -> Fraction:
        return mass if self.method.by_attention else Fraction(token)

    def over_heads(self, token: int) -> tuple[Fraction, int]:
        return sum((scores[token] for scores in self.scores), Fraction(0)), token


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    prompt=st.lists(PIECES, min_size=1, max_size=30),
    answer=st.lists(PIECES, max_size=16),
    expected=st.integers(0, 12),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2]),
    method=st.builds(
        lambda cls, fields: cls(**fields),
        st.sampled_from(METHODS),
        st.fixed_dictionaries(
            {
                "budget": st.floats(0.1, 0.95),
                "sponsor_share": st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
                "value_span": st.sampled_from([0, 1, 8]),
                "sinks": st.integers(0, 4),
                "recent_min": st.integers(1, 8),
                "min_tokens": st.integers(1, 12),
            }
        ),
    ),
)
def test_equals_the_literal_form(
    seed: int,
    prompt: list[bytes],
    answer: list[bytes],
    expected: int,
    kv_heads: int,
    group: int,
    method: TransAttn,
) -> None:
    about = info(prompt, layers=2, kv_heads=kv_heads, group=group, expected=expected)
    rules = [LiteralTransAttn(method, about, LiteralText(method.value_span)) for _ in range(2)]
    same_as_rules(method.open(about), about, rules, seed, answer)


@pytest.mark.parametrize("method", METHODS)
def test_hearing_of_tokens_before_they_are_fed_changes_nothing(method: type[TransAttn]) -> None:
    words = [b" k", b"=", b"v", b",", b" w", b"\n"] * 6
    about = info(words)
    one, other = (method(budget=0.4).open(about) for _ in range(2))
    for number, word in enumerate(words):
        other.accepted(Decoded(number, 0, word, None))  # type: ignore[attr-defined]
    driven = Driven(one, about), Driven(other, about)
    for state in driven:
        state.place([torch.arange(36.0)[None]])
    for word in words:
        mass = torch.ones(1, 1, driven[0].tokens + 1)
        for state in driven:
            state.step(mass, word)
        assert driven[0].held == driven[1].held


@pytest.mark.parametrize("anchors", [TransAttn(budget=0.4), TransAttnFast(budget=0.4)])
def test_answers_as_a_dense_decoder_that_masks_what_was_dropped(
    anchors: TransAttn, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path, "llama", seed=4)
    model, dense, tokenizer = load_model(str(folder)), DenseDecoder(folder), tiny_tokenizer()
    heads, changed = model.layout, set[str]()
    for number, toy in enumerate(toy_requests(model)[5:9]):
        text = f'Call get_{number}: {{"city": "Rome", "days": {number}}} for base = 2 in Paris.\n'
        prompt = (*tokenizer.encode(text), *toy.prompt_ids[-number:])
        request = replace(toy, prompt_ids=prompt)
        unsponsored = replace(anchors, sponsor_share=0.0)
        entries = (("full", FullKV()), ("anchors", anchors), ("base", unsponsored))
        task = Task(request, entries, expected_new_tokens=12)
        found = {
            one.entry: one.token_ids
            for one in generate(model, [task], Limits(24), kv_dtype=torch.float32, page_slots=1)
        }
        texts = [model.token_texts[token] for token in prompt]
        about = info(texts, layers=heads.layers, kv_heads=heads.kv_heads, group=heads.group_size)
        about = replace(about, expected_new_tokens=12)
        rules = [LiteralTransAttn(anchors, about, LiteralText(8)) for _ in range(heads.layers)]
        assert found["anchors"] == dense.answer(request, rules, model.token_texts, 24)
        changed |= {entry for entry in ("full", "base") if found[entry] != found["anchors"]}
    assert changed == {"full", "base"}


@pytest.mark.parametrize("method", METHODS)
def test_keep_everything_asks_for_nothing(method: type[TransAttn]) -> None:
    state = method(nominal=1.0).open(info([b"x"] * 20))
    assert (state.wants, state.evicts, state.notes) == (Wants(), False, ())


def test_only_the_full_variant_looks_at_attention() -> None:
    about = info([b"x"] * 20)
    assert TransAttn().open(about).wants == Wants(prompt_mass=True, step_mass=True)
    assert TransAttnFast().open(about).wants == Wants()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt", range(1, 65))
def test_short_prompts(method: type[TransAttn], prompt: int) -> None:
    about = info([b"key", b":", b" v", b"\n"] * 16)
    about = replace(about, prompt_tokens=prompt, texts=about.texts and about.texts[:prompt])
    state = method(budget=0.33).open(about)
    wanted = round(0.33 * prompt)
    assert (UNREACHABLE in state.notes) == (wanted < 8)
    run = Driven(state, about)
    run.place([torch.rand(1, prompt)])
    for decoded in range(1, 12):
        run.step(torch.rand(1, 1, prompt + decoded), b"key: v")
        assert len(run.held[0][0]) == min(prompt + decoded, max(8, wanted))


@pytest.mark.parametrize("texts", [None, [b"x"] * 3])
def test_a_prompt_without_its_texts_is_refused(texts: list[bytes] | None) -> None:
    with pytest.raises(ValueError, match="transattn: anchors need the text of each prompt token"):
        TransAttn().open(PromptInfo(4, 1, 1, 1, 8, texts=texts))


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": 0.01},
        {"anchors": "none"},
        {"sponsor_share": 1.5},
        {"recent_share": -0.1},
        {"recent_min": 0},
        {"value_span": -1},
        {"sinks": -1},
        {"min_tokens": 0},
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_refused_parameters(method: type[TransAttn], fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{method.name}: "):
        method(**fields)
