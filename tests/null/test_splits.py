"""The splits: the paper's sizes, no row twice, the same for every order, and no leaks by group."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pask.bfcl import splits as module
from pask.bfcl.data import CATEGORIES, SUBSETS, Row, data_digest, load_rows
from pask.bfcl.splits import KINDS, PARTS, Splits, build_splits, leaks, paper_sizes
from pask.errors import PaskError

PAPER = {
    "cal": (80, 40, 40, 40, 52, 210, 3, 5),
    "dev": (80, 40, 40, 40, 52, 210, 3, 5),
    "test": (240, 120, 120, 120, 154, 633, 10, 14),
}
# Changing one of these makes every published number another experiment's.
DIGESTS = {
    "paper": "702e22c9c54c157b2f36343f6524ec6bd0d651538a38879d58ca3c7768db548d",
    "group": "34f4c5f13755a91b40dd66561964c13195ab4471f5cfd472e8eb86cb4dac4dc0",
}


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return load_rows()


@pytest.fixture(scope="module")
def paper(rows) -> Splits:
    return build_splits(rows, "paper", 0)


def test_paper_sizes(paper):
    assert {part: tuple(paper.sizes(part).values()) for part in PARTS} == PAPER
    assert list(paper.sizes("test")) == list(CATEGORIES)
    assert len(paper.ids("test", SUBSETS["nonlive"])) == 600
    assert len(paper.ids("test", SUBSETS["live"])) == 811


@given(st.lists(st.integers(0, 2000), min_size=8, max_size=8))
def test_largest_remainder(counts):
    counts = dict(zip(CATEGORIES, counts, strict=True))
    sizes = paper_sizes(counts)
    for names in SUBSETS.values():
        total = sum(counts[c] for c in names)
        fifth = (2 * total + 5) // 10
        assert sum(sizes["cal"].get(c, 0) for c in names) == fifth
        for c in names:
            if counts[c]:
                assert sum(sizes[part][c] for part in PARTS) == counts[c]
                assert abs(sizes["cal"][c] - fifth * counts[c] / total) < 1
                assert sizes["dev"][c] == sizes["cal"][c]


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_in_one_part(rows, kind):
    built = build_splits(rows, kind, 5)
    everywhere = Counter(i for part in PARTS for i in built.ids(part))
    assert set(everywhere) == set(rows)
    assert set(everywhere.values()) == {1}
    assert all(
        rows[i].category == category
        for part in PARTS
        for category, ids in built.parts[part].items()
        for i in ids
    )


@pytest.mark.parametrize("kind", KINDS)
def test_seed_zero_is_pinned(rows, kind):
    assert build_splits(rows, kind, 0).digest == DIGESTS[kind]
    assert build_splits(rows, kind, 1).digest != DIGESTS[kind]


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 99), shuffle=st.integers(0, 2**32))
def test_the_order_of_the_rows_does_not_matter(rows, kind, seed, shuffle):
    ids = list(rows)[::7]
    shuffled = random.Random(shuffle).sample(ids, len(ids))
    built = build_splits({i: rows[i] for i in ids}, kind, seed)
    assert build_splits({i: rows[i] for i in shuffled}, kind, seed) == built


def test_paper_split_leaks_and_the_report_says_so(rows, paper):
    report = leaks(paper, rows)
    assert report["multiple"] == {
        "rows": 120,
        "tool_set": 3,
        "tool_names": 37,
        "question": 26,
        "any": 54,
    }
    assert report["live_multiple"] == {
        "rows": 633,
        "tool_set": 443,
        "tool_names": 533,
        "question": 9,
        "any": 538,
    }


@pytest.mark.parametrize("seed", range(3))
def test_group_split_leaks_nothing_at_nearly_the_paper_sizes(rows, seed):
    built = build_splits(rows, "group", seed)
    shared = [entry[kind] for entry in leaks(built, rows).values() for kind in ("any", "tool_set")]
    assert shared == [0] * 16
    for kind, key in module.LEAKS.items():  # nor between cal and dev, said without `leaks`
        parts = [{key(rows[i]) for i in built.ids(part)} for part in PARTS]
        assert len(set.union(*parts)) == sum(map(len, parts)), kind
    for part in PARTS:
        for size, wanted in zip(built.sizes(part).values(), PAPER[part], strict=True):
            assert abs(size - wanted) <= 1


def test_group_split_follows_chains():
    def row(number: int, tool: str, text: str) -> Row:
        return Row(
            f"parallel_{number}",
            "parallel",
            ({"role": "user", "content": text},),
            ({"name": tool, "parameters": {}},),
            ({tool: {}},),
        )

    # 0 and 1 share a tool, 1 and 2 a question but for case and spacing: all three belong together
    chain = [row(0, "a", "first"), row(1, "a", "Second  one"), row(2, "b", "second one")]
    alone = [row(n, f"tool{n}", f"text {n}") for n in range(3, 15)]
    for seed in range(5):
        built = build_splits({r.id: r for r in chain + alone}, "group", seed)
        homes = {part for part in PARTS for r in chain if r.id in built.ids(part)}
        assert len(homes) == 1


def test_reworded_docs_are_the_same_tools(rows):
    row = rows["simple_python_0"]
    docs = tuple(f | {"description": "another"} for f in row.functions)
    reworded = Row("simple_python_x", row.category, row.messages, docs, row.gold)
    assert reworded.cluster != row.cluster
    assert module.tool_names(reworded) == module.tool_names(row)


def test_a_larger_sample_contains_the_smaller(paper):
    small = paper.sample("test", {"parallel": 3, "live_multiple": 10})
    large = paper.sample("test", {"live_multiple": 11, "parallel": 120})
    assert {c: len(ids) for c, ids in small.items()} == {"parallel": 3, "live_multiple": 10}
    assert list(small) == ["parallel", "live_multiple"]
    assert list(large) == ["parallel", "live_multiple"]  # the order of the split, not of the ask
    assert all(large[c][: len(ids)] == ids for c, ids in small.items())
    assert large["parallel"] == paper.parts["test"]["parallel"]
    assert paper.sample("dev") == paper.parts["dev"]


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"live_parallel": 11}, "11 rows asked of live_parallel, there are 10"),
        ({"live_parallel": -1}, "there are 10"),
        ({"java": 1}, "unknown BFCL category 'java'"),
    ],
)
def test_a_sample_that_is_not_there(paper, sizes, word):
    with pytest.raises(PaskError, match=word):
        paper.sample("test", sizes)


def test_unknown_part_and_kind(paper, rows):
    with pytest.raises(PaskError, match="unknown part 'train'"):
        paper.ids("train")
    with pytest.raises(PaskError, match="unknown split kind 'random'"):
        build_splits(rows, "random", 0)


def test_a_row_in_two_places_is_refused(paper):
    twice = dict(paper.parts) | {"dev": paper.parts["cal"]}
    with pytest.raises(PaskError, match="two places"):
        Splits("paper", 0, paper.data_digest, twice)


def test_a_file_gives_the_same_split(tmp_path, paper):
    path = tmp_path / "new" / "splits.json"
    paper.write(path)
    assert Splits.read(path) == paper
    first = path.read_bytes()
    Splits.read(path).write(path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == ["splits.json"]
    assert json.loads(first)["digest"] == DIGESTS["paper"]


def edited(content: dict) -> str:
    content["parts"]["test"]["parallel"].pop()
    return json.dumps(content)


def of_other_data(content: dict) -> str:
    del content["digest"]
    content["data_digest"] = "0" * 64
    return json.dumps(content | {"digest": module.digest(content)})


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (edited, "edited"),
        (lambda content: json.dumps(content | {"seed": 1}), "edited"),
        (lambda content: json.dumps(content)[:-9], "not JSON"),
        (lambda content: "", "not JSON"),
        (lambda content: "[]", "schema pask-splits-1"),
        (lambda content: json.dumps(content | {"schema": "pask-splits-0"}), "schema pask-splits-1"),
        (of_other_data, "other BFCL data"),
    ],
)
def test_a_spoilt_file_is_refused_in_one_line(tmp_path, paper, spoil, word):
    path = tmp_path / "splits.json"
    paper.write(path)
    path.write_text(spoil(json.loads(path.read_text())))
    with pytest.raises(PaskError, match=word) as caught:
        Splits.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(PaskError, match="No such file"):
        Splits.read(tmp_path / "none.json")


def test_the_split_names_its_data(paper):
    assert paper.data_digest == data_digest()
