"""The KV store against a dictionary of tokens, through random lives of many sequences."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pask.engine.kv_seat import CHANNEL2, KIND_POOL, Pool, pool_slots
from pask.engine.kv_store import KVShape, KVStore, OutOfPages, Run, Seat
from pask.methods.contract import Placement
from pask.methods.levels import LOW_LEVELS, Level
from tests.cpu.kv_model import SeatModel, Token

LAYERS, HEADS, GROUP, DIM, PAGE, SEATS = 2, 2, 2, 32, 4, 4
MAX_TOKENS = 64
LOW_SETS = [(), (Level.LOW4,), (Level.LOW8, Level.LOW3), (Level.LOW2,), (Level.LOW2, Level.LOW4)]


class Lives(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([24, 400]), seed=st.integers(0, 2**16))
    def start(self, capacity: int, seed: int) -> None:
        self.store = KVStore.sized(
            KVShape(LAYERS, HEADS, DIM),
            capacity,
            dict.fromkeys((Level.HIGH, *LOW_LEVELS, CHANNEL2), 1.0),
            seats=SEATS,
            max_tokens=MAX_TOKENS,
            page_slots=PAGE,
        )
        self.random = np.random.default_rng(seed)
        self.models: dict[Seat, SeatModel] = {}

    # Helpers

    def numbers(self, *shape: int) -> torch.Tensor:
        """Keys with channels of very different sizes and offsets, as real ones have."""
        scale = np.exp(self.random.normal(size=shape[-1:]))
        offset = 3 * self.random.normal(size=shape[-1:])
        return torch.from_numpy(
            (self.random.normal(size=shape) * scale + offset).astype(np.float32)
        )

    def picked(self, data: st.DataObject) -> Seat:
        return data.draw(st.sampled_from(sorted(self.models, key=lambda seat: seat.id)))

    def placement(
        self, data: st.DataObject, prompt: int, levels: tuple[Level, ...], channel_keys: bool
    ) -> Placement:
        if data.draw(st.booleans(), label="whole"):
            return Placement()
        order = np.stack([self.random.permutation(prompt) for _ in range(HEADS)])
        tokens, start = {}, 0
        for level in (*levels, Level.HIGH):
            if channel_keys and level is Level.LOW2:
                count = 32 * data.draw(st.integers(0, (prompt - start) // 32), label="groups")
            else:
                count = data.draw(st.integers(0, prompt - start), label=level.name)
            rows = np.sort(order[:, start : start + count], axis=1)
            tokens[level] = torch.from_numpy(rows)
            start += count
        return Placement(tokens)

    def keep(self, seat: Seat, model: SeatModel) -> None:
        """Follow a seat. Its statistics are compared, then taken over: they are sums, and one that
        rounds the other way moves the codes of a whole token."""
        if model.has_statistics:
            for (layer, head), expected in model.statistics.items():
                shift = self.store.statistics.shift(layer)
                found = [
                    part[seat.id, head].double().numpy() for part in (shift.center, shift.spread)
                ]
                np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
                model.statistics[layer, head] = found[0], found[1]
        self.models[seat] = model

    # Rules

    @rule(data=st.data(), share=st.booleans())
    def open(self, data: st.DataObject, share: bool) -> None:
        assume(len(self.models) < SEATS - share)
        levels = data.draw(st.sampled_from(LOW_SETS), label="levels")
        channel_keys = data.draw(st.booleans(), label="channel_keys")
        sizes = st.integers(30, 36) if channel_keys else st.integers(1, 19)
        prompt = data.draw(sizes, label="prompt")
        kind = {
            "recent": data.draw(st.integers(-1, 6), label="recent"),
            "levels": frozenset(levels),
            "normalise": not channel_keys and data.draw(st.booleans(), label="normalise"),
            "channel_keys": channel_keys,
            "acts": data.draw(st.booleans(), label="acts"),
            "ring_slots": data.draw(st.sampled_from([None, 12, 30]), label="ring"),
        }
        seats = [self.store.open(prompt, **kind) for _ in range(1 + share)]
        models = [SeatModel.of(seat, LAYERS, HEADS) for seat in seats]
        try:
            for layer in range(LAYERS):
                keys, values = self.numbers(HEADS, prompt, DIM), self.numbers(HEADS, prompt, DIM)
                at = self.placement(data, prompt, levels, channel_keys)
                self.store.add_prompt(seats, layer, keys, values, at)
                for model in models:
                    model.fill(layer, keys.half().numpy(), values.half().numpy(), at.tokens)
        except OutOfPages:
            for seat in seats:
                self.store.free(seat)
            return
        for seat, model in zip(seats, models, strict=True):
            self.keep(seat, model)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), mass=st.booleans())
    def step(self, data: st.DataObject, mass: bool) -> None:
        seats = data.draw(
            st.lists(
                st.sampled_from(sorted(self.models, key=lambda s: s.id)), min_size=1, unique=True
            )
        )
        runs = []
        for seat in seats:
            most = min(seat.longest_run, MAX_TOKENS - seat.position, 9)
            if most < 1:
                continue
            rows = data.draw(st.integers(1, most), label="rows")
            levels = None
            if seat.acts and data.draw(st.booleans(), label="leveled"):
                allowed = (*seat.decoded_levels, Level.RELEASE, Level.HIGH)
                choice = [int(level) for level in allowed]
                levels = self.random.choice(choice, size=(rows, LAYERS)).astype(np.int8)
            runs.append(Run(seat, levels, rows))
        assume(runs)
        rows = sum(run.length for run in runs)
        try:
            step = self.store.begin(runs, mass=mass)
        except OutOfPages:
            return
        q = torch.from_numpy(self.random.normal(size=(LAYERS, rows, HEADS * GROUP, DIM))).float()
        k, v = (self.numbers(LAYERS, rows, HEADS, DIM) for _ in range(2))
        out = torch.stack(
            [step.attend(layer, q[layer], k[layer], v[layer]) for layer in range(LAYERS)]
        )
        step.finish()
        self.feed(runs, k.half().numpy(), v.half().numpy())
        row = 0
        for number, run in enumerate(runs):
            model = self.models[run.seat]
            expected_mass = np.zeros((LAYERS, HEADS, run.seat.position))
            for fed in range(model.fed - run.length + 1, model.fed + 1):
                self.compare_row(model, fed, q[:, row].numpy(), out[:, row].numpy(), expected_mass)
                assert step.resident_bytes[row] == model.bytes(fed, PAGE, DIM)
                row += 1
            if mass:
                np.testing.assert_allclose(step.mass(number), expected_mass, atol=2e-5)

    def feed(self, runs: list[Run], keys: np.ndarray, values: np.ndarray) -> None:
        row = 0
        for run in runs:
            model = self.models[run.seat]
            for n in range(run.length):
                for layer, head in model.heads:
                    level = Level.HIGH if run.levels is None else Level(run.levels[n, layer])
                    token = Token(level, keys[layer, row, head], values[layer, row, head])
                    model.decoded[layer, head].append(token)
                row += 1
            model.written = max(model.written, model.fed)

    def compare_row(
        self, model: SeatModel, fed: int, q: np.ndarray, out: np.ndarray, mass: np.ndarray
    ) -> None:
        for layer, head in model.heads:
            for query in range(head * GROUP, (head + 1) * GROUP):
                positions, weights, expected = model.attention((layer, head), fed, q[layer, query])
                np.testing.assert_allclose(out[layer, query], expected, rtol=1e-4, atol=1e-4)
                mass[layer, head, positions] += weights

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Several seats at once, each losing another number of tokens."""
        seats = data.draw(st.lists(st.sampled_from(list(self.models)), min_size=1, unique=True))
        lists = [self.some_high(self.models[seat], data.draw(st.integers(1, 5))) for seat in seats]
        try:
            self.store.evict_together(seats, [torch.from_numpy(tokens) for tokens in lists])
        except OutOfPages:  # a shared page could not be copied
            assert any(seat.shares for seat in seats)
            return
        for seat, tokens in zip(seats, lists, strict=True):
            model = self.models[seat]
            for layer, head in model.heads:
                model.evicted[layer, head].update(set(tokens[layer, head].tolist()) - {-1})
            if (tokens >= 0).any():
                model.cut_from = model.fed

    def some_high(self, model: SeatModel, count: int) -> np.ndarray:
        """At most `count` tokens at HIGH of each head, [layers, kv_heads, count], then -1."""
        high = {
            where: sorted(model.resident(where, model.fed).get("high", {})) for where in model.heads
        }
        tokens = np.full((LAYERS, HEADS, count), -1)
        for layer in range(LAYERS):
            lost = min(count, *(len(high[layer, head]) for head in range(HEADS)))
            for head in range(HEADS):
                chosen = self.random.choice(high[layer, head], size=lost, replace=False)
                tokens[layer, head, :lost] = chosen
        return tokens

    @precondition(lambda self: 0 < len(self.models) < SEATS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seat = self.picked(data)
        self.models[self.store.fork(seat)] = copy.deepcopy(self.models[seat])

    @precondition(lambda self: 0 < len(self.models) < SEATS)
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        seat = self.picked(data)
        model = self.models[seat]
        levels = data.draw(st.sampled_from(LOW_SETS), label="levels")
        channel_keys = data.draw(st.booleans(), label="channel_keys")
        at = [self.placement(data, seat.prompt_tokens, levels, channel_keys) for _ in range(LAYERS)]
        whole = all(
            len(tokens) == seat.prompt_tokens
            and all(token.level is Level.HIGH for token in tokens.values())
            for tokens in model.prompt.values()
        ) and not any(model.evicted.values())
        kind = {
            "recent": data.draw(st.integers(-1, 5)),
            "levels": frozenset(levels),
            "normalise": not channel_keys,
            "channel_keys": channel_keys,
        }
        if not whole:
            if not any(model.evicted.values()):
                with pytest.raises(ValueError, match="whole prompt at HIGH"):
                    self.store.place(seat, at, **kind)
            return
        try:
            placed = self.store.place(seat, at, **kind)
        except OutOfPages:
            return
        new = SeatModel.of(placed, LAYERS, HEADS)
        for layer in range(LAYERS):
            keys, values = (
                np.stack(
                    [
                        [
                            getattr(model.prompt[layer, head][token], part)
                            for token in range(seat.prompt_tokens)
                        ]
                        for head in range(HEADS)
                    ]
                )
                for part in ("key", "value")
            )
            new.fill(layer, keys, values, at[layer].tokens)
        self.keep(placed, new)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), back=st.integers(0, 12))
    def truncate(self, data: st.DataObject, back: int) -> None:
        seat = self.picked(data)
        model = self.models[seat]
        decoded = model.fed - back
        waiting = [
            [token.level is not Level.HIGH for token in model.decoded[layer, 0]]
            for layer in range(LAYERS)
        ]
        if decoded < model.cut_from:
            with pytest.raises(ValueError, match="cannot cut"):
                self.store.truncate(seat, decoded)
            return
        try:
            self.store.truncate(seat, decoded)
        except ValueError:
            # Only a ring that has been gone round may have lost anything.
            needed = max(sum(layer[max(decoded - 1 - seat.recent, 0) :]) for layer in waiting)
            assert needed > seat.ring_slots or model.written > model.fed
            return
        for tokens in model.decoded.values():
            del tokens[decoded:]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seat = self.picked(data)
        del self.models[seat]
        self.store.free(seat)
        with pytest.raises(ValueError, match="freed"):
            self.store.begin([Run(seat, None, 1)])

    @precondition(lambda self: self.models)
    @rule(data=st.data(), high=st.integers(0, 40), low=st.integers(0, 10))
    def reserve(self, data: st.DataObject, high: int, low: int) -> None:
        seat = self.picked(data)
        pools = [KIND_POOL[seat.kind(level)] for level in seat.levels]
        tokens: dict[Pool, int] = {Level.HIGH: high, **dict.fromkeys(pools, low)}
        try:
            self.store.reserve(seat, tokens)
        except OutOfPages:
            more = {pool: n + pool_slots(pool, PAGE) for pool, n in tokens.items()}
            assert not self.store.room_for(more)

    # Invariants

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check()
        for seat, model in self.models.items():
            assert (seat.decoded, seat.position) == (
                model.fed,
                model.prompt_tokens + model.fed,
            )
            assert self.store.resident_total(seat) == model.bytes(model.fed, PAGE, DIM)
            for layer in range(LAYERS):
                self.compare_dense(seat, model, layer)
        if not self.models:
            assert all(used == 0 for used, _ in self.store.pool_bytes().values())

    def compare_dense(self, seat: Seat, model: SeatModel, layer: int) -> None:
        dense = self.store.dense(seat, layer)
        for head in range(HEADS):
            expected = model.resident((layer, head), model.fed)
            assert set(dense) == set(expected)
            for kind, (tokens, keys, values) in dense.items():
                assert sorted(tokens[head].tolist()) == sorted(expected[kind])
                for got, part in ((keys, 0), (values, 1)):
                    wanted = np.stack(
                        [expected[kind][token][part] for token in tokens[head].tolist()]
                    )
                    size = np.maximum(1.0, np.abs(wanted).max(axis=1, keepdims=True))
                    near = 0.0 if kind in ("high", "recent") else 2e-5 * size
                    assert (np.abs(got[head].numpy() - wanted) <= near).all()


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=12,
    stateful_step_count=16,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
