"""TriAxialKV and its R/L/H form: worked examples, counted bytes, and a tiny random model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch

from baselines.triaxialkv import TriAxialKV, TriAxialRLH, prompt_tags
from pask.engine.decode import generate
from pask.engine.generation import Generation, Limits, Task
from pask.engine.loading import LoadedModel, load_model
from pask.methods.contract import Captures, Decoded, Method, PromptInfo, RequestState
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.structure.labels import Label
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import SomeRequest, toy_requests

# Tag, D at the lowest level, D at INT4, median tokens.
Rows = tuple[tuple[str, float, float, int], ...]
ROWS: Rows = (
    ("current|delim", 6.0, 1.0, 10),
    ("current|user", 30.0, 2.0, 20),
    ("older|delim", 1.0, 0.5, 10),
    ("older|inst", 40.0, 4.0, 60),
)


def labels_of(older_delim: int, inst: int, user: int, delim: int) -> tuple[Label, ...]:
    """A prompt's labels: some chat scaffold, a tool document, the user's text, scaffold."""
    return (
        (Label.CHAT_SCAFFOLD,) * older_delim
        + (Label.FUNCTION_NAME,) * inst
        + (Label.USER,) * user
        + (Label.CHAT_SCAFFOLD,) * delim
    )


def info(
    labels: Sequence[Label] | None, *, expected: int = 0, page: int = 1, prompt: int = 0
) -> PromptInfo:
    count = prompt if labels is None else len(labels)
    return PromptInfo(count, 2, 3, 1, 32, expected, page, labels)


def placed(state: RequestState, about: PromptInfo) -> str:
    """Each prompt token's level as a character: `.` released, `2`, `4`, `H`."""
    placements = [state.place(layer, Captures()) for layer in range(about.layers)]
    for placement in placements:
        placement.check(about, state.levels)
    assert placements[0] == placements[1]
    if placements[0].tokens is None:
        return "H" * about.prompt_tokens
    rows = [["."] * about.prompt_tokens for _ in range(about.kv_heads)]
    for level, tokens in placements[0].tokens.items():
        for head, row in enumerate(tokens.tolist()):
            for token in row:
                rows[head][token] = {2: "2", 4: "4", 16: "H"}[level]
    assert rows[0] == rows[1] == rows[2]
    return "".join(rows[0])


def at(method: Method, labels: Sequence[Label], **about: int) -> str:
    known = info(labels, **about)
    return placed(method.open(known), known)


# Tags


def test_the_tags_of_a_small_prompt() -> None:
    labels = [
        Label.CHAT_SCAFFOLD,
        Label.INSTRUCTION,
        Label.TOOL_SCAFFOLD,
        Label.FUNCTION_NAME,
        Label.WORKED_EXAMPLE,
        Label.CHAT_SCAFFOLD,
        Label.USER,
        Label.INSTRUCTION,
        Label.USER,
        Label.CHAT_SCAFFOLD,
    ]
    assert prompt_tags(labels) == (
        "older|delim",
        "older|inst",
        "older|inst",
        "older|inst",
        "older|inst",
        "older|delim",
        "current|user",
        "current|inst",
        "current|user",
        "current|delim",
    )
    assert prompt_tags([Label.TYPE, Label.CHAT_SCAFFOLD]) == ("older|inst", "older|delim")
    assert prompt_tags([Label.USER]) == ("current|user",)


# The paper's map


@pytest.mark.parametrize(
    ("bits", "at_int4"),
    [
        (2.0, set()),
        (2.19, set()),  # 19 bits over 100 tokens: 20 would take a tag of ten
        (2.2, {"current|delim"}),
        (2.4, {"current|user"}),  # saves 28; the two small ones 5.5
        (2.6, {"current|user", "current|delim"}),
        (2.8, {"current|user", "current|delim", "older|delim"}),
        (3.2, {"older|inst"}),  # 120 bits save 36, the other three tags 33.5 for 80
        (3.6, {"older|inst", "current|user"}),
        (4.0, {"older|inst", "current|user", "current|delim", "older|delim"}),
    ],
)
def test_the_map_is_the_best_of_all_maps(bits: float, at_int4: set[str]) -> None:
    method = TriAxialKV(nominal=bits, sensitivity=ROWS)
    assert method.at_int4 == at_int4
    losses = {}
    for chosen in itertools.product((2, 4), repeat=4):
        if sum(b * row[3] for b, row in zip(chosen, ROWS, strict=True)) <= bits * 100:
            losses[chosen] = sum(row[b // 2] for b, row in zip(chosen, ROWS, strict=True))
    found = sum(row[2] if row[0] in method.at_int4 else row[1] for row in ROWS)
    assert found == min(losses.values())


def test_a_tag_that_int4_does_not_help_stays_at_int2() -> None:
    rows = (("current|user", 1.0, 1.0, 10), ("older|inst", 1.0, 2.0, 10))
    assert TriAxialKV(nominal=4.0, sensitivity=rows).at_int4 == frozenset()


def test_whole_tags_as_in_the_paper() -> None:
    method = TriAxialKV(nominal=2.4, sensitivity=ROWS, split_marginal=False)
    # 96 tokens of other tags are three groups of 32.
    assert at(method, labels_of(6, 80, 7, 10)) == "2" * 86 + "4" * 7 + "2" * 10
    # 97: one is left, the last in the order of positions.
    assert at(method, labels_of(6, 80, 7, 11)) == "2" * 86 + "4" * 7 + "2" * 10 + "4"


def test_bits_are_spent_tag_by_tag_and_the_last_tag_in_part() -> None:
    labels = labels_of(6, 80, 7, 10)
    method = TriAxialKV(nominal=2.4, sensitivity=ROWS)
    # Bits for 103 * 0.2 = 20 tokens at INT4: the user's 7, 10 of delim, 3 of the tool document
    # (by gain per token 1.4, then 0.5 and 0.3 against 0.05 of the older delim). Of the 83 others
    # 64 are two groups, the last 19 are left over.
    assert at(method, labels) == "2" * 64 + "4" * 39
    # 2.71: 36 tokens, so that 67 are left: two groups, and three more at INT4.
    method = TriAxialKV(nominal=2.71, sensitivity=ROWS)
    assert at(method, labels) == "2" * 64 + "4" * 39
    # 2.2: the map has the delim alone, it comes first; none is left for the document.
    method = TriAxialKV(nominal=2.2, sensitivity=ROWS)
    assert method.order == ("current|delim", "current|user", "older|inst", "older|delim")
    # 10 of 106 tokens at INT4: all delim there are. The 96 others are whole groups.
    assert at(method, labels_of(6, 83, 7, 10)) == "2" * 96 + "4" * 10
    # 12 of 128, but 116 are no multiple: 96 stay, the 20 last of them go up too.
    assert at(method, labels_of(6, 103, 9, 10)) == "2" * 96 + "4" * 32


def test_a_tag_that_calibration_did_not_see_comes_first() -> None:
    labels = (Label.USER,) * 40 + (Label.INSTRUCTION,) * 10 + (Label.CHAT_SCAFFOLD,) * 14
    method = TriAxialKV(nominal=3.0, sensitivity=ROWS)  # 32 of 64 tokens
    # current|inst is new: all ten; then the map's user tag, its most recent 22.
    assert method.order[0] == "current|user"
    assert at(method, labels) == "2" * 18 + "4" * 32 + "2" * 14


@pytest.mark.parametrize("prompt", [1, 2, 31, 32, 33, 63, 64, 95, 100])
@pytest.mark.parametrize("bits", [2.0, 2.3, 2.7, 3.5, 4.0])
def test_int2_tokens_are_whole_groups_and_short_prompts_say_so(prompt: int, bits: float) -> None:
    labels = labels_of(prompt // 10, prompt - prompt // 10 - prompt // 5, prompt // 5, 0)
    about = info(labels)
    state = TriAxialKV(nominal=bits, sensitivity=ROWS).open(about)
    found = placed(state, about)
    asked = int(prompt * (bits - 2) / 2 + 1e-9)
    assert found.count("2") == (prompt - asked) // 32 * 32
    assert found.count("2") + found.count("4") == prompt
    assert state.notes == (("unreachable",) if asked < prompt % 32 else ())
    assert state.channel_keys == ("2" in found)
    assert not state.shifted_keys


def test_decoded_tokens_are_int4_at_once() -> None:
    state = TriAxialKV(sensitivity=ROWS).open(info(labels_of(2, 50, 3, 4)))
    assert state.acts_on_tokens
    assert state.recent == -1
    assert list(state.level_of(Decoded(0, 5, b"x", None))) == [Level.LOW4] * 2


@pytest.mark.parametrize(
    ("budget", "bits"), [(0.1875, 2.0), (0.23125, 2.7), (0.25, 3.0), (0.3125, 4.0)]
)
def test_bits_of_a_budget(budget: float, bits: float) -> None:
    assert TriAxialKV(budget=budget).setting == pytest.approx(bits)
    assert TriAxialKV(budget=budget, nominal=2.5).setting == 2.5


# Release, INT4, 16 bit


def test_the_order_in_which_bytes_are_spent() -> None:
    # Per token and byte from release to INT4: user 28/20/(5/16) = 4.48, inst 36/60/(5/16) = 1.92,
    # delim 5/10/(5/16) = 1.6; to 16 bit: user 2/20/(11/16) = 0.145 and so on. The older delim's
    # INT4 lies on no hull: 0.9 is more than the line from 1.0 to 0 has there.
    rows = (*ROWS[:2], ("older|delim", 1.0, 0.9, 10), ROWS[3])
    assert TriAxialRLH(sensitivity=rows).steps == (
        ("current|user", Level.RELEASE, Level.LOW4),
        ("older|inst", Level.RELEASE, Level.LOW4),
        ("current|delim", Level.RELEASE, Level.LOW4),
        ("current|delim", Level.LOW4, Level.HIGH),
        ("current|user", Level.LOW4, Level.HIGH),
        ("older|delim", Level.RELEASE, Level.HIGH),
        ("older|inst", Level.LOW4, Level.HIGH),
    )


@pytest.mark.parametrize(
    ("slots", "wanted"),
    [
        # k tokens at INT4 take 5k/16 slots, and one for the key statistics. The user's come first,
        (2.2, "." * 14 + "444" + "..."),  # three: 1.9375, four: 2.25
        (2.3, "." * 13 + "4444" + "..."),
        (3.5, "." * 9 + "4444" + "4444" + "..."),  # then the document's, from its end,
        (6.4, "." * 2 + "4" * 15 + ".44"),  # then the delim's after the user, 17 in all: 6.3125
        (6.7, "." * 2 + "4" * 18),
        (7.3, "4" * 20),  # 7.25
        # To 16 bit takes 11/16 more. Delim and user save alike: delim, by name.
        (8.0, "4" * 19 + "H"),  # 7.9375
        (12.1, "4" * 13 + "H" * 7),  # 12.0625
        (19.9, "44" + "H" * 18),  # 19.625; with one token at INT4 it would be 20.3125
        (20.0, "H" * 20),
    ],
)
def test_a_share_is_spent_token_by_token(slots: float, wanted: str) -> None:
    labels = labels_of(2, 11, 4, 3)
    assert at(TriAxialRLH(nominal=slots / 20, sensitivity=ROWS), labels) == wanted


def test_an_answer_is_paid_for_and_pages_count_whole() -> None:
    labels = labels_of(2, 11, 4, 3)
    about = info(labels, expected=10, page=16)  # Full KV: 32 slots
    # The answer takes a page, 16 slots, with room for six prompt tokens; a page at INT4 takes 5,
    # the key statistics 1. The order wants the user's at INT4 first, so no less than 22 is held.
    for share, notes in ((0.69, ()), (0.68, ("unreachable",)), (0.1, ("unreachable",))):
        state = TriAxialRLH(nominal=share, sensitivity=ROWS).open(about)
        assert state.notes == notes
        assert placed(state, about) == "4" * 14 + "H" * 6


def test_the_answer_at_int4() -> None:
    labels = labels_of(2, 11, 4, 3)
    about = info(labels, expected=10)
    method = TriAxialRLH(nominal=7.6 / 30, sensitivity=ROWS, decode_level="low4")
    # 10 * 5/16 + 1 (statistics) = 4.125; 11 more: 7.5625, 12: 7.875.
    state = method.open(about)
    assert placed(state, about) == "." * 6 + "4" * 11 + "..."
    assert state.acts_on_tokens
    assert list(state.level_of(Decoded(0, 5, b"x", None))) == [Level.LOW4] * 2
    full = dataclasses.replace(method, nominal=1.0).open(about)
    assert not full.acts_on_tokens
    assert placed(full, about) == "H" * 20


def test_whole_tags_only() -> None:
    labels = labels_of(2, 11, 4, 3)
    method = TriAxialRLH(nominal=0.25, sensitivity=ROWS, split_marginal=False)
    assert at(method, labels) == "." * 13 + "4444" + "..."
    state = TriAxialRLH(nominal=0.1, sensitivity=ROWS, split_marginal=False).open(info(labels))
    assert state.notes == ("unreachable",)
    assert placed(state, info(labels)) == "." * 16 + "4" + "..."


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("expected", [0, 7, 40])
@pytest.mark.parametrize("prompt", [1, 2, 17, 64, 300])
def test_the_more_is_asked_the_more_is_held_and_never_more_than_that(
    prompt: int, expected: int, page: int
) -> None:
    labels = labels_of(prompt // 10, prompt - 2 * (prompt // 10) - prompt // 5, prompt // 5, 0)
    labels += (Label.CHAT_SCAFFOLD,) * (prompt - len(labels))
    about = info(labels, expected=expected, page=page)
    full = -(-(prompt + expected) // page) * page
    last = 0.0
    for share in range(0, 101):
        method = TriAxialRLH(nominal=share / 100, sensitivity=ROWS)
        state = method.open(about)
        found = placed(state, about)
        low, high = found.count("4"), found.count("H") + expected
        held = -(-high // page) * page + -(-low // page) * page * 5 / 16 + (low > 0)
        assert held >= last
        assert (held > share / 100 * full) == (state.notes == ("unreachable",))
        assert state.levels == ({Level.LOW4} if low else frozenset())
        if page == 1 and not state.notes and low + high < prompt + expected:
            assert held > share / 100 * full - 1.32  # one more token would have been too much
        last = held
    assert found == "H" * prompt
    assert state.place(0, Captures()).tokens is None


# Both


@pytest.mark.parametrize("cls", [TriAxialKV, TriAxialRLH])
def test_what_is_refused(cls: type[TriAxialKV] | type[TriAxialRLH]) -> None:
    with pytest.raises(ValueError, match=f"{cls.name}: not calibrated: run pask calibrate"):
        cls().open(info(labels_of(1, 1, 1, 1)))
    with pytest.raises(ValueError, match=f"{cls.name}: tags need"):
        cls(sensitivity=ROWS).open(info(None, prompt=5))
    for row in (
        ("a", -1.0, 0.0, 1),
        ("a", 1.0, float("nan"), 1),
        ("a", float("inf"), 1.0, 1),
        ("a", 1.0, 0.0, 0),
    ):
        with pytest.raises(ValueError, match=cls.name):
            cls(sensitivity=(row,))
    with pytest.raises(ValueError, match="twice"):
        cls(sensitivity=(ROWS[0], ROWS[0]))
    with pytest.raises(ValueError, match="budget"):
        cls(budget=0.01)
    with pytest.raises(ValueError, match="nominal"):
        cls(nominal=-0.1)


def test_a_level_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="triaxialkv_rlh: decode_level"):
        TriAxialRLH(decode_level="LOW4")


@dataclasses.dataclass(frozen=True)
class FakeEvidence:
    """Answers D = weight * tokens * penalty of the level, and remembers what it was asked."""

    info: PromptInfo
    weight: float
    asked: list[tuple[object, ...]]

    def distortion(
        self,
        tokens: torch.Tensor,
        level: Level,
        *,
        shifted_keys: bool = False,
        channel_keys: bool = False,
    ) -> float:
        self.asked.append((tokens.tolist(), level, shifted_keys, channel_keys))
        return self.weight * len(tokens) * {0: 100, 2: 10, 4: 1}[int(level)]


def evidence(asked: list[tuple[object, ...]]) -> Iterable[FakeEvidence]:
    """Three prompts, passed through once."""
    for weight, labels in (
        (1.0, labels_of(1, 4, 2, 1)),
        (2.0, labels_of(1, 6, 0, 0)),
        (3.0, labels_of(1, 2, 6, 1)),
    ):
        yield FakeEvidence(info(labels), weight, asked)


def test_calibration_takes_means_of_losses_and_medians_of_counts() -> None:
    asked: list[tuple[object, ...]] = []
    measured = TriAxialKV().calibrate(evidence(asked))
    assert measured == {
        "sensitivity": (
            ("current|delim", pytest.approx(40 / 3), pytest.approx(4 / 3), 1),
            ("current|user", pytest.approx(200 / 3), pytest.approx(20 / 3), 2),
            ("older|delim", 20.0, 2.0, 1),
            ("older|inst", pytest.approx(220 / 3), pytest.approx(22 / 3), 4),
        )
    }
    assert asked[:2] == [
        ([7], Level.LOW2, False, True),
        ([7], Level.LOW4, False, False),
    ]
    assert asked[2][0] == [5, 6]
    assert TriAxialKV(**measured).open(info(labels_of(1, 4, 2, 1)))


def test_calibration_of_the_other_actions() -> None:
    asked: list[tuple[object, ...]] = []
    (measured,) = TriAxialRLH().calibrate(evidence(asked)).values()
    assert measured[2] == ("older|delim", 200.0, 2.0, 1)
    assert asked[:2] == [
        ([7], Level.RELEASE, False, False),
        ([7], Level.LOW4, True, False),
    ]
    with pytest.raises(ValueError, match="no calibration prompts"):
        TriAxialRLH().calibrate([])


# In the engine

LIMITS = Limits(24)
HEAD_DIM, HEADS = 32, 2 * 2  # layers times kv heads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_model(str(tiny_folder(folder, "llama", seed=5, head_dim=HEAD_DIM)))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    found = []
    for request in toy_requests(model)[1::4]:
        prompt = len(request.prompt_ids)
        labels = labels_of(3, prompt - 10, 5, 2)
        found.append(dataclasses.replace(request, prompt_labels=labels))
    return found


def answers(
    model: LoadedModel, requests: Sequence[SomeRequest], **methods: Method
) -> dict[tuple[str, str], Generation]:
    tasks = [Task(request, tuple(methods.items())) for request in requests]
    found = generate(model, tasks, LIMITS, max_batch=5)
    return {(one.entry, one.request_id): one for one in found}


def test_keeping_everything_gives_full_kvs_tokens(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    rlh = TriAxialRLH(nominal=1.0, sensitivity=ROWS)
    low = dataclasses.replace(rlh, decode_level="low4")
    found = answers(model, requests, full=FullKV(), rlh=rlh, low=low)
    for request in requests:
        full = found["full", request.id]
        for name in ("rlh", "low"):
            same = found[name, request.id]
            assert same == dataclasses.replace(full, entry=name)


def test_bytes_are_those_of_the_formula(model: LoadedModel, requests: list[SomeRequest]) -> None:
    """Per kv head: 2-bit pages of 32 with ranges by channel and by token, 4-bit pages of 16."""
    found = answers(
        model,
        requests,
        int2=TriAxialKV(nominal=2.0, sensitivity=ROWS),
        int4=TriAxialKV(nominal=4.0, sensitivity=ROWS),
        rlh=TriAxialRLH(nominal=0.4, sensitivity=ROWS),
    )
    int2_page = 2 * 32 * HEAD_DIM // 4 + HEAD_DIM * 4 + 32 * (HEAD_DIM // 32) * 4
    int4_page = 16 * 2 * (HEAD_DIM // 2 + HEAD_DIM // 32 * 4)
    high_page = 16 * 2 * HEAD_DIM * 2
    for request in requests:
        prompt = len(request.prompt_ids)
        for name, at_int2 in (("int2", prompt // 32 * 32), ("int4", 0)):
            one = found[name, request.id]
            fed = one.new_tokens - (one.finish == "length")
            int4 = -(-(prompt - at_int2 + fed) // 16)
            wanted = at_int2 // 32 * int2_page + int4 * int4_page
            assert one.bytes.prompt + one.bytes.decode == HEADS * wanted
        one = found["rlh", request.id]
        fed = one.new_tokens - (one.finish == "length")
        about = info(request.prompt_labels, page=16)
        kept = placed(TriAxialRLH(nominal=0.4, sensitivity=ROWS).open(about), about)
        low, high = kept.count("4"), kept.count("H") + fed
        vectors = 2 * HEAD_DIM * 2 if low else 0
        wanted = -(-high // 16) * high_page + -(-low // 16) * int4_page + vectors
        assert one.bytes.prompt + one.bytes.decode == HEADS * wanted
