"""Interventions on a row: outcomes are complete generation's, and what cannot change is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from pask.bfcl.data import load_rows
from pask.bfcl.request import Request, RequestBuilder
from pask.calibration.distortion import distortions
from pask.calibration.intervention import Buckets, Interventions, OneBucket, OneLabel
from pask.calibration.reference import (
    Judge,
    Reference,
    _beginning,
    read_reference,
    replayed_part,
)
from pask.calibration.sensitivity import Outcome, Plan
from pask.engine.decode import generate, new_store
from pask.engine.generation import Generation, Limits, Task
from pask.engine.kv_plan import Run
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.engine.replay import Replayer
from pask.engine.replay_job import GiveUp, lay, prepared_for
from pask.engine.trace import Trace
from pask.methods.contract import Method
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.structure.buckets import LayerBucket, bucket_name
from tests.cpu.test_distortion import watched
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import SomeRequest

LIMITS = Limits(64)
LAYERS = 3
COARSENING = "role_choice_next"
GROUPS = (0, 1)  # layer 0, and layers 1 and 2
BUCKETS = Buckets(GROUPS, COARSENING)
TRIED = Interventions(recent=2, ladder=Ladder.parse("R,L2,L4,L8,H"), sinks=4)
ROWS = ("simple_python_3", "live_simple_10-3-6")


def judge(answer: Generation) -> bool:
    """Some verdict that follows from the text alone and is right about half of the time."""
    return sum(answer.text.encode()) % 2 == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    shape = {"head_dim": 32, "num_hidden_layers": LAYERS, "max_position_embeddings": 8192}
    return load_model(str(tiny_folder(tmp_path_factory.mktemp("m"), "llama", seed=4, **shape)))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[Request]:
    rows = load_rows()
    builder = RequestBuilder(model.tokenizer, tokenizer_info(model), "format_last", "json_list")
    return [builder.build(rows[row_id]) for row_id in ROWS]


@pytest.fixture(scope="module")
def answers(model: LoadedModel, requests: list[Request]) -> dict[str, Generation]:
    tasks = [Task(request, (("full", FullKV()),)) for request in requests]
    return {found.request_id: found for found in generate(model, tasks, LIMITS)}


@pytest.fixture(scope="module")
def store(model: LoadedModel) -> Iterator[KVStore]:
    store = new_store(model, seats=40, capacity_tokens=65_536)
    yield store
    store.check()
    assert not any(store.seats)


def read(replayer: Replayer, request: Request, tokens: tuple[int, ...]) -> Reference:
    task = Task(request, (("full", FullKV()),))
    return read_reference(replayer, task, tokens, judge, buckets=BUCKETS, sinks=TRIED.sinks)


def outcomes(
    replayer: Replayer,
    reference: Reference,
    judge: Judge,
    *,
    layers: int,
    buckets: Buckets,
    interventions: Interventions,
    max_batch: int = 32,
    hopeless: GiveUp | None = None,
) -> tuple[Outcome, ...]:
    """Those of one row alone."""
    plan = Plan(layers, buckets, interventions)
    trace = replayed_part(reference, hopeless)
    methods = plan.methods(reference, trace.fed)
    replayed = {
        one.generation.entry: one
        for one in replayer.replay(trace, methods, max_batch=max_batch, give_up=hopeless)
    }
    return plan.outcomes(reference, trace.fed, replayed, judge)


def tried(
    replayer: Replayer, reference: Reference, interventions: Interventions = TRIED
) -> tuple[Outcome, ...]:
    return outcomes(
        replayer,
        reference,
        judge,
        layers=LAYERS,
        buckets=BUCKETS,
        interventions=interventions,
        max_batch=16,
    )


@dataclass(frozen=True)
class Measured:
    """A row, its answer under Full KV, and what was found on it."""

    request: Request
    known: Generation
    reference: Reference  # its trace is freed
    outcomes: tuple[Outcome, ...]


@pytest.fixture(scope="module")
def measured(
    model: LoadedModel, requests: list[Request], answers: dict[str, Generation], store: KVStore
) -> list[Measured]:
    replayer = Replayer(model, store, LIMITS)
    found = []
    for request in requests:
        known = answers[request.id]
        reference = read(replayer, request, known.token_ids)
        found.append(Measured(request, known, reference, tried(replayer, reference)))
        replayer.free(reference.trace)
        store.check()
    return found


@pytest.fixture
def reference(
    model: LoadedModel, requests: list[Request], answers: dict[str, Generation], store: KVStore
) -> Iterator[Reference]:
    replayer = Replayer(model, store, LIMITS)
    found = read(replayer, requests[0], answers[requests[0].id].token_ids)
    yield found
    replayer.free(found.trace)


def test_what_is_felt_through_the_layers_is_what_decoding_shows(
    model: LoadedModel, store: KVStore, reference: Reference
) -> None:
    """The reference's tokens, fed one by one with the intervention and without."""
    trace, group = reference.trace, slice(1, LAYERS)
    ones = [Run(store.fork(trace.prompt), None, 1)] * trace.fed
    whole = watched(model, store, ones[0].seat, trace, ones)
    store.free(ones[0].seat)
    upper = [
        one
        for one in tried(Replayer(model, store, LIMITS), reference)
        if one.bucket.group == 1 and one.level in (Level.RELEASE, Level.LOW4)
    ]
    for one in (*upper[:4], *upper[-4:]):  # of each side
        named = ("one", method_of(one))
        prepared, placements = prepared_for(model, store, trace, named, LIMITS)
        job = lay(prepared, placements, store, trace, named, LIMITS)
        levels = job.levels
        fed = watched(
            *(model, store, job.seat, trace),
            [
                Run(job.seat, None if levels is None else levels[n : n + 1], 1)
                for n in range(trace.fed)
            ],
        )
        store.free(job.seat)
        total = sum(
            float((own[3] - other[3]).double().square().sum(-1).amax(-1).sum())
            for own, other in list(zip(fed, whole, strict=True))[group]
        )
        assert one.propagated == pytest.approx(total, rel=1e-4, abs=1e-12)
        assert (one.propagated > 1e-12) == (one.positions > 0)


def test_in_a_group_of_one_layer_it_is_the_local_distortion(
    model: LoadedModel, store: KVStore, reference: Reference
) -> None:
    groups = Buckets(LAYERS, COARSENING)
    trace = reference.trace
    found = outcomes(
        Replayer(model, store, LIMITS),
        reference,
        judge,
        layers=LAYERS,
        buckets=groups,
        interventions=TRIED,
    )
    local = {
        (one.side, one.bucket, one.level): one
        for one in distortions(
            *(model, store, trace),
            groups=LAYERS,
            coarsening=COARSENING,
            recent=TRIED.recent,
            ladder=TRIED.levels,
            sinks=TRIED.sinks,
        )
    }
    assert len(found) == len(local)
    for one in found:
        other = local[one.side, one.bucket, one.level]
        assert one.propagated == pytest.approx(other.total, rel=2e-3, abs=1e-10)
        assert one.positions == other.positions
    assert sum(one.propagated > 0 for one in found) > len(found) / 2


def method_of(one: Outcome) -> Method:
    if one.side == "decode":
        return OneBucket(
            bucket=one.bucket, level=one.level, recent=2, groups=GROUPS, coarsening=COARSENING
        )
    return OneLabel(bucket=one.bucket, level=one.level, sinks=4, groups=GROUPS)


def test_outcomes_are_those_of_complete_generation(
    model: LoadedModel, measured: list[Measured]
) -> None:
    """Every third one of two rows: both sides, both groups, all levels of a long ladder."""
    seen: Counter[tuple[str, bool]] = Counter()
    verdicts: Counter[bool] = Counter()
    for row in measured:
        assert row.reference.correct == judge(row.known)
        found = {str(n): one for n, one in enumerate(row.outcomes[::3])}
        assert len(found) <= 64
        entries = tuple((entry, method_of(one)) for entry, one in found.items())
        complete = list(generate(model, [Task(row.request, entries)], LIMITS))
        assert {answer.entry for answer in complete} == set(found)
        for answer in complete:
            one = found[answer.entry]
            assert one.changed == (answer.token_ids != row.known.token_ids)
            assert one.correct == judge(answer)
            seen[one.side, one.changed] += 1
            verdicts[one.correct == row.reference.correct] += 1
    # Both ways were gone.
    assert min(seen[side, way] for side in ("decode", "prompt") for way in (True, False)) >= 3
    assert min(verdicts[True], verdicts[False]) >= 5


def test_what_occurs_is_tried_and_nothing_else(measured: list[Measured]) -> None:
    for row in measured:
        fed = row.known.new_tokens - (row.known.finish == "length")
        names = Counter(bucket_name(tag, COARSENING) for tag in row.known.tags[:fed])
        labels = Counter(label.value for label in row.request.prompt_labels[4:-1])
        assert Counter(row.reference.names) == names
        assert row.reference.labels == labels
        expected = {
            (side, name, group, level): tokens
            for side, counts in (("decode", names), ("prompt", labels))
            for name, tokens in counts.items()
            for group in (0, 1)
            for level in (Level.RELEASE, Level.LOW2, Level.LOW4, Level.LOW8)
        }
        assert {(o.side, *o.bucket, o.level): o.tokens for o in row.outcomes} == expected
        assert len(row.outcomes) == len(expected)


def test_the_cost_of_an_unchanged_answer(measured: list[Measured]) -> None:
    """The layers from the group's first on; the rows from the bucket's first token on, all rows
    where the prompt was touched; nothing where no choice can feel it."""
    kinds: Counter[str] = Counter()
    for row in measured:
        fed = row.reference.trace.fed
        names = [bucket_name(tag, COARSENING) for tag in row.known.tags[:fed]]
        for one in row.outcomes:
            layers = LAYERS - GROUPS[one.bucket.group]
            if one.side == "prompt":
                kind, cost = "prompt", fed * layers
            else:
                first = names.index(one.bucket.name)
                # Fed token `fed - 1` is the last query, and 2 before it are whole still.
                kind = "felt" if first <= fed - 1 - 2 - 1 else "never"
                cost = (fed - first) * layers if kind == "felt" else 0
            if kind == "never":
                assert (one.changed, one.correct) == (False, row.reference.correct)
            if not one.changed:
                assert one.token_layers == cost
                kinds[kind] += 1
            else:
                assert one.token_layers >= cost
    assert kinds["prompt"] > 5
    assert kinds["felt"] > 5


def test_a_window_longer_than_the_answer(
    model: LoadedModel, requests: list[Request], answers: dict[str, Generation], store: KVStore
) -> None:
    """One token may leave a window of fed - 2: those whose name it has are tried, at one row's
    cost. None leaves a longer one."""
    replayer = Replayer(model, store, LIMITS)
    request = requests[0]
    reference = read(replayer, request, answers[request.id].token_ids)
    fed = reference.trace.fed

    def felt(recent: int) -> set[str]:
        found = tried(replayer, reference, Interventions(recent, Ladder.parse("R,H")))
        decode = [one for one in found if one.side == "decode"]
        assert {one.bucket.name for one in decode} == set(reference.names)
        assert not any(one.changed for one in decode if not one.token_layers)
        return {one.bucket.name for one in decode if one.token_layers}

    assert felt(fed - 1) == set()
    assert felt(fed - 2) == {reference.names[0]}
    assert felt(fed - 3) == set(reference.names[:2])
    assert felt(-1) == set(reference.names)
    replayer.free(reference.trace)


def test_only_changed_answers_are_judged(
    model: LoadedModel, requests: list[Request], answers: dict[str, Generation], store: KVStore
) -> None:
    judged: list[str] = []

    def watched(answer: Generation) -> bool:
        judged.append(answer.text)
        return judge(answer)

    replayer = Replayer(model, store, LIMITS)
    request = requests[0]
    known = answers[request.id]
    task = Task(request, (("full", FullKV()),))
    reference = read_reference(replayer, task, known.token_ids, watched, buckets=BUCKETS, sinks=4)
    assert judged == [known.text]
    found = outcomes(
        replayer, reference, watched, layers=LAYERS, buckets=BUCKETS, interventions=TRIED
    )
    changed = [one for one in found if one.changed]
    # Several changes may lead to one text, which is judged once.
    assert 0 < len(judged[1:]) == len(set(judged[1:])) < len(changed) < len(found)
    assert not any(one.given_up for one in found)
    replayer.free(reference.trace)


AT = 66


def test_giving_up_changes_no_verdict(
    model: LoadedModel, requests: list[Request], answers: dict[str, Generation], store: KVStore
) -> None:
    """Of references that are hopeless from some character on, and of right ones."""
    replayer = Replayer(model, store, LIMITS)
    seen: Counter[str] = Counter()
    for request in requests:
        known = answers[request.id]
        for wrong in (True, False):

            def hopeless(text: str, wrong: bool = wrong, letter: str = known.text[AT]) -> bool:
                """It has, or lacks, the reference's character there."""
                return len(text) > AT and (text[AT] == letter) == wrong

            def right(answer: Generation, hopeless: GiveUp = hopeless) -> bool:
                return not hopeless(answer.text)

            task = Task(request, (("full", FullKV()),))
            reference = read_reference(
                replayer, task, known.token_ids, right, buckets=BUCKETS, sinks=4
            )
            assert reference.correct != wrong
            whole, early = (
                outcomes(
                    replayer,
                    reference,
                    right,
                    layers=LAYERS,
                    buckets=BUCKETS,
                    interventions=TRIED,
                    hopeless=give_up,
                )
                for give_up in (None, hopeless)
            )
            replayer.free(reference.trace)
            for one, other in zip(whole, early, strict=True):
                assert (one.side, one.bucket, one.level) == (other.side, other.bucket, other.level)
                assert one.tokens == other.tokens
                assert one.correct == other.correct
                assert one.changed or not other.changed
                assert one.token_layers >= other.token_layers
                assert not (other.given_up and other.correct)
                if other.given_up:
                    assert one.fed >= other.fed
                elif other.token_layers:  # none: what it changes comes too late to count
                    felt = {"propagated": other.propagated, "positions": other.positions}
                    assert replace(one, token_layers=other.token_layers, **felt) == other
                # Of a wrong reference no more than its beginning is compared.
                assert one.propagated >= other.propagated
                assert one.positions >= other.positions
                if reference.correct:
                    assert (one.propagated, one.positions) == (other.propagated, other.positions)
                kind = "changed" if other.changed else "same"
                seen[f"{kind}, given up"] += other.given_up
                seen["gained"] += one.correct and not reference.correct
                seen["lost"] += reference.correct and not one.correct
                seen["cheaper"] += one.token_layers > other.token_layers
    assert min(seen.values()) >= 5
    assert len(seen) == 5


def test_the_beginning_of_a_trace_is_a_trace(
    model: LoadedModel, requests: list[Request], answers: dict[str, Generation], store: KVStore
) -> None:
    """Replays on the first tokens of an answer give what replays on the whole of it give."""
    replayer = Replayer(model, store, LIMITS)
    reference = read(replayer, requests[0], answers[requests[0].id].token_ids)
    methods: list[tuple[str, Method]] = [("full", FullKV())]
    for level in (Level.RELEASE, Level.LOW2):
        for name in dict.fromkeys(reference.names):
            bucket = LayerBucket(name, 0)
            one = OneBucket(
                bucket=bucket, level=level, recent=2, groups=GROUPS, coarsening=COARSENING
            )
            methods.append((f"{name} {level}", one))

    def replayed(trace: Trace) -> dict[str, Generation]:
        return {f.generation.entry: f.generation for f in replayer.replay(trace, methods)}

    whole = replayed(reference.trace)
    assert len({found.token_ids for found in whole.values()}) > 3
    for tokens in (1, 2, 30, 63):
        assert replayed(_beginning(reference.trace, tokens)) == whole
    replayer.free(reference.trace)


def test_another_engine_s_answer_gives_way_to_ours(
    model: LoadedModel, measured: list[Measured], store: KVStore
) -> None:
    replayer = Replayer(model, store, LIMITS)
    row = measured[0]
    other_method = next(method_of(one) for one in row.outcomes if one.changed)
    (other,) = generate(model, [Task(row.request, (("other", other_method),))], LIMITS)
    assert other.token_ids != row.known.token_ids
    found, own = read(replayer, row.request, other.token_ids), row.reference
    assert found.trace.tokens == row.known.token_ids
    assert (found.correct, found.names, found.labels) == (own.correct, own.names, own.labels)
    assert found.trace.chosen == own.trace.chosen
    replayer.free(found.trace)


def test_records_are_written_by_short_names(measured: list[Measured]) -> None:
    one = next(o for o in measured[0].outcomes if o.level is Level.LOW4)
    assert one.record() == {
        "side": one.side,
        "bucket": one.bucket.name,
        "group": one.bucket.group,
        "level": "L4",
        "tokens": one.tokens,
        "changed": one.changed,
        "correct": one.correct,
        "given_up": one.given_up,
        "fed": one.fed,
        "token_layers": one.token_layers,
        "propagated": one.propagated,
        "positions": one.positions,
    }


def test_tags_and_labels_are_needed(
    model: LoadedModel, requests: list[Request], answers: dict[str, Generation]
) -> None:
    replayer = Replayer(model, new_store(model, seats=4, capacity_tokens=4096), LIMITS)
    whole = requests[0]
    known = answers[whole.id].token_ids
    untagged = SomeRequest("x", whole.prompt_ids, whole.grammar, None, whole.prompt_labels)
    with pytest.raises(ValueError, match="made of tags"):
        read(replayer, untagged, known)  # type: ignore[arg-type]
    unlabelled = SomeRequest("x", whole.prompt_ids, whole.grammar, whole.tag_grammar)
    with pytest.raises(ValueError, match="made of labels"):
        read(replayer, unlabelled, known)  # type: ignore[arg-type]
