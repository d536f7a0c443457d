"""What of the engine's time goes into a method's own work: scoring, choosing, evicting, quantising.

The engine holds no timers: while a `Watch` is on, the functions in which that work is done are
wrapped. One prompt is read for all methods, as always; a step of decoding is made for one method's
answers after the other, which changes no answer.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from pask.engine import answer as answering
from pask.engine import batch as batching
from pask.engine import decode, kv_leave, kv_prompt, kv_statistics, kv_step, kv_store
from pask.engine import prefill as prefilling

PHASES = ("prefill", "decode")

_IN_PREFILL: tuple[tuple[Any, str], ...] = (
    (kv_prompt, "append_low"),
    (kv_prompt, "put_channel"),
    (kv_prompt, "append_bounds"),
    (kv_statistics.KeyStatistics, "measure"),
)
_IN_DECODE: tuple[tuple[Any, str], ...] = (
    (answering, "evicted"),
    (answering, "levels_of"),
    (kv_store.KVStore, "evict_together"),
    (kv_step.Step, "mass"),
    (kv_step, "choose_slots"),
    (kv_step, "append_bounds"),
    (kv_leave, "append_low"),
)


@dataclass
class Watch:
    """Seconds by (entry, phase): of the engine in all, and of the method's own work in it.

    `calls` counts the calls of functions that do such work, by (entry, function); `rows`: tokens
    fed by entry; `spent`: the seconds of those calls.
    """

    total: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    own: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    spent: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    _now: tuple[str, str] | None = None  # whose work is done, in which phase
    _inside: bool = False  # of a function whose time is taken already
    _turn: bool = False  # whether the last attention was timed with its probabilities

    def share(self, entry: str, phase: str) -> float:
        """Own work's share of the phase, 0 to 1; `own`, with a difference of timings in it, may
        come out below 0 by noise, which is a share of 0."""
        total = self.total[entry, phase]
        return max(0.0, self.own[entry, phase]) / total if total else 0.0

    def lookup(self, entry: str) -> float:
        """The share of decoding in which the levels of decoded tokens are decided, 0 to 1."""
        total = self.total[entry, "decode"]
        return self.spent[entry, "levels_of"] / total if total else 0.0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Wrap what is to be timed, and unwrap it at the end."""
        with ExitStack() as stack:
            for owner, name in (*_IN_PREFILL, *_IN_DECODE):
                stack.enter_context(_replaced(owner, name, self._timed))
            stack.enter_context(_replaced(decode, "prefill", self._prefill))
            stack.enter_context(_replaced(batching.Batch, "step", self._step))
            stack.enter_context(_replaced(kv_step, "paged_attention", self._attention))
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._now is None or self._inside:
                return function(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.own[self._now] += seconds
                self.calls[self._now[0], function.__name__] += 1
                self.spent[self._now[0], function.__name__] += seconds
                self._inside = False

        return wrapper

    def _attention(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(attention)
        def wrapper(*args: Any, probabilities: bool = False, **kwargs: Any) -> Any:
            if self._now is None or not probabilities:
                return attention(*args, probabilities=probabilities, **kwargs)
            # Whichever call comes first has to fetch the KV, so only first calls are compared:
            # every second one is made without probabilities, and each stands for two.
            self.calls[self._now[0], "paged_attention"] += 1
            self._turn = not self._turn
            if self._turn:
                answer, seconds = _seconds(lambda: attention(*args, probabilities=True, **kwargs))
                self.own[self._now] += 2 * seconds
                self.total[self._now] += seconds
                return answer
            _, without = _seconds(lambda: attention(*args, **kwargs))
            answer, again = _seconds(lambda: attention(*args, probabilities=True, **kwargs))
            self.own[self._now] -= 2 * without
            self.total[self._now] -= without + again
            return answer

        return wrapper

    def _step(self, step: Callable[..., None]) -> Callable[..., None]:
        @wraps(step)
        def by_entry(batch: batching.Batch, running: Sequence[answering.Answer]) -> None:
            groups: dict[str, list[answering.Answer]] = {}
            for answer in running:
                groups.setdefault(_entry(answer.who), []).append(answer)
            for entry, answers in groups.items():
                fed = sum(answer.fed for answer in answers)
                self._now = (entry, "decode")
                self._turn = not self._turn  # with an even number of layers, the other ones' turn
                start = time.perf_counter()
                step(batch, answers)
                self.total[self._now] += time.perf_counter() - start
                self._now = None
                self.rows[entry] += sum(answer.fed for answer in answers) - fed

        return by_entry

    def _prefill(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(prefill)
        def watched(model: Any, prepared: prefilling.Prepared, seats: Any, store: Any) -> Any:
            task = _Prompt(self, prepared, seats)
            with task.on():
                start = time.perf_counter()
                logits = prefill(model, prepared, seats, store)
                task.close(time.perf_counter() - start)
            return logits

        return watched


class _Prompt:
    """One prompt that is read for several methods: what each of them would have paid alone.

    All that is done once for all is everybody's; a capture is the work of each method that wants
    it; placing and storing are the method's, of which placing and quantising is own work.
    """

    def __init__(self, watch: Watch, prepared: prefilling.Prepared, seats: Sequence[Any]) -> None:
        self._watch = watch
        self._entries = [_entry(who) for who in prepared.who]
        self._wants = [state.wants for state in prepared.states]
        self._of_seat = {id(seat): name for seat, name in zip(seats, self._entries, strict=True)}
        self._apart: defaultdict[str, float] = defaultdict(float)  # by entry
        self._captures: defaultdict[object, float] = defaultdict(float)  # by what was captured
        self._once = 0.0  # seconds of all of these, none counted twice

    @contextmanager
    def on(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (prefilling, "placement", self._placing),
                (prefilling, "window_mass", self._window),
                (prefilling, "column_mass", self._columns),
                (kv_store.KVStore, "add_prompt", self._storing),
            ):
                stack.enter_context(_replaced(owner, name, wrapper))
            yield

    def close(self, seconds: float) -> None:
        common = seconds - self._once
        for entry, wants in zip(self._entries, self._wants, strict=True):
            seen = self._captures[wants.window_queries] if wants.window_queries else 0.0
            seen += self._captures["prompt_mass"] if wants.prompt_mass else 0.0
            self._watch.own[entry, "prefill"] += seen
            self._watch.total[entry, "prefill"] += common + self._apart[entry] + seen

    def _placing(self, placement: Callable[..., Any]) -> Callable[..., Any]:
        def timed(state: Any, layer: int, captures: Any, info: Any, who: str) -> Any:
            entry = _entry(who)
            answer, seconds = _seconds(placement, state, layer, captures, info, who)
            self._once += seconds
            self._apart[entry] += seconds
            self._watch.own[entry, "prefill"] += seconds
            self._watch.calls[entry, "placement"] += 1
            return answer

        return timed

    def _window(self, window_mass: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, queries: self._capture(queries, window_mass, q, k, queries)

    def _columns(self, column_mass: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k: self._capture("prompt_mass", column_mass, q, k)

    def _capture(self, what: object, function: Callable[..., Any], *args: Any) -> Any:
        answer, seconds = _seconds(function, *args)
        self._once += seconds
        self._captures[what] += seconds
        return answer

    def _storing(self, add_prompt: Callable[..., None]) -> Callable[..., None]:
        def timed(store: Any, seats: Sequence[Any], *args: Any) -> None:
            entries = [self._of_seat[id(seat)] for seat in seats]
            self._watch._now = (entries[0], "prefill")  # what is quantised is never shared
            _, seconds = _seconds(add_prompt, store, seats, *args)
            self._watch._now = None
            self._once += seconds
            for entry in entries:  # a copy for several is what each of them would have made
                self._apart[entry] += seconds

        return timed


def _entry(who: str) -> str:
    """The entry's name, from how the engine names an answer: entry, row."""
    return who.partition(",")[0]


def _seconds(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    answer = function(*args)
    return answer, time.perf_counter() - start


@contextmanager
def _replaced(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrapper(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
