"""Each method's own work, as a share of its prefill and of its decoding; a tenth is allowed.

Own work is what Full KV does not do: capturing attention, scoring and placing the prompt, deciding
where decoded tokens end, evicting, summarising, choosing what to read, quantising. Every method of
the registry answers the same rows, at a third of the bytes or what comes nearest. Besides, Full KV
answers them alone before all others have run and again afterwards: the engine makes the same calls.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pask.bench import Measured
from pask.bench.made_up_policy import made_up_policy
from pask.bench.own_work import PHASES, Watch
from pask.bench.rows import picked_rows
from pask.bfcl.data import subset_of
from pask.bfcl.request import RequestBuilder
from pask.config import RunConfig
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.engine.prefill import prepare
from pask.evaluation.model import load
from pask.methods.contract import Method, PromptEvidence, PromptInfo
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.methods.pask import PASK
from pask.methods.registry import make_method, registry
from pask.paths import PROJECT

BUDGET = 0.33
ALLOWED = 10.0  # per cent
NEW_TOKENS = 24
FULL_ROWS = 2  # that Full KV answers before and after all others
COUNTED_TOKENS = 6  # of those, where calls are counted: a profiler is slow


@dataclass(frozen=True)
class MadeUpEvidence:
    """Distortions for a method that is calibrated, none of them measured: that a token costs more
    the later it stands and the less is left of it is enough to time the method by."""

    info: PromptInfo

    def distortion(
        self,
        tokens: torch.Tensor,
        level: Level,
        *,
        shifted_keys: bool = False,
        channel_keys: bool = False,
    ) -> float:
        if not tokens.numel():
            return 0.0
        late = float(tokens.float().mean()) / self.info.prompt_tokens
        lost = 2.0 ** -int(level) - 2.0 ** -int(Level.HIGH)
        return len(tokens) * lost * (1 + late)


def method_at(
    name: str,
    evidence: Sequence[PromptEvidence],
    config: RunConfig,
    layers: int,
    budget: float = BUDGET,
) -> Method:
    """A method of the registry at the budget, or at what it has that is nearest."""
    low, high = registry()[name].budgets
    budget = min(max(budget, low), high)
    measured: Mapping[str, Any] | None = None
    if registry()[name].calibrated:
        measured = make_method(name, budget).calibrate(evidence)
    bare = make_method(name, budget)
    if isinstance(bare, PASK):
        measured = {"policy": made_up_policy(bare, config, layers)}
    return make_method(name, budget, measured=measured)


class _Work:
    """The model, and the rows' requests with how long an answer to them is."""

    def __init__(self, config: RunConfig, items: int) -> None:
        self.config = config
        self.model: LoadedModel = load(config)
        builder = RequestBuilder(
            self.model.tokenizer,
            tokenizer_info(self.model),
            config.model.prompt,
            config.model.answer_form,
        )
        expected = config.model.expected_new_tokens
        self.rows = [
            (builder.build(row), expected[subset_of(row.category)])
            for row in picked_rows(config, items)
        ]
        self.limits = Limits(min(config.max_new_tokens, NEW_TOKENS))

    def tasks(self, methods: Mapping[str, Method]) -> list[Task]:
        entries = tuple(methods.items())
        return [Task(request, entries, expected) for request, expected in self.rows]

    @property
    def full_tasks(self) -> list[Task]:
        return self.tasks({"full": FullKV()})[:FULL_ROWS]

    def evidence(self) -> list[MadeUpEvidence]:
        tasks = self.tasks({"full": FullKV()})
        pages = self.config.engine.page_slots
        made = [prepare(self.model, task, self.limits, pages) for task in tasks]
        return [MadeUpEvidence(prepared.info) for prepared in made]

    def answer(self, tasks: Sequence[Task], limits: Limits) -> None:
        """All tasks at once: every method's answers to all rows decode together."""
        longest = max(len(task.request.prompt_ids) for task in tasks) + limits.max_new_tokens
        entries = sum(len(task.methods) for task in tasks)
        engine = self.config.engine
        for _ in generate(
            self.model,
            tasks,
            limits,
            max_batch=entries,
            kv_dtype=KV_DTYPES[engine.kv_dtype],
            page_slots=engine.page_slots,
            # Rings and summaries lie beside the tokens; pages that are not used take no memory.
            capacity_tokens=2 * entries * (longest + 2 * engine.page_slots),
        ):
            pass

    def watched(self, tasks: Sequence[Task]) -> Watch:
        watch = Watch()
        with watch.on():
            self.answer(tasks, self.limits)
        return watch

    def seconds_of_full(self) -> float:
        """How long Full KV alone decodes."""
        return self.watched(self.full_tasks).total["full", "decode"]

    def calls_of_full(self) -> Counter[str]:
        """The engine's calls under Full KV alone."""
        limits = Limits(min(self.limits.max_new_tokens, COUNTED_TOKENS))
        with _Counted() as counted:
            self.answer(self.full_tasks, limits)
        return counted.calls


class _Counted:
    """Counts the calls of Python functions of the engine and its kernels."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._folders = tuple(str(PROJECT / part) for part in ("pask", "kernels", "baselines"))

    def __enter__(self) -> _Counted:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._folders):
            path = Path(code.co_filename)
            self.calls[f"{path.parent.name}/{path.stem}:{code.co_qualname}"] += 1


def measure(config: RunConfig, items: int) -> Measured:
    """The largest share, per cent, of all methods and of both phases, over `items` rows."""
    torch.set_num_threads(1)
    work = _Work(config, items)
    work.answer(work.full_tasks[:1], Limits(1))  # what only the first call pays
    seconds, calls = [work.seconds_of_full()], [work.calls_of_full()]
    evidence = work.evidence()
    layers = work.model.layout.layers
    methods = {name: method_at(name, evidence, config, layers) for name in registry()}
    watch = work.watched(work.tasks(methods))
    seconds.append(work.seconds_of_full())
    calls.append(work.calls_of_full())
    worst = max(100 * watch.share(name, phase) for name in methods for phase in PHASES)
    print(_table(methods, watch, len(work.rows)), file=sys.stderr)
    before, after = calls
    print(
        f"Full KV alone, before and after the others ran: "
        f"{'the same' if before == after else 'NOT the same'} calls in the engine "
        f"({before.total()} and {after.total()}), {seconds[0]:.2f} and {seconds[1]:.2f} s of "
        "decoding",
        file=sys.stderr,
    )
    for name, count in sorted((after - before).items()):
        print(f"  {count} more of {name}", file=sys.stderr)
    unit = "per cent of prefill or decoding that is a method's own work, the most; 10 are allowed"
    return Measured(worst, ALLOWED, unit, len(work.rows), less_is_better=True)


def _table(methods: Mapping[str, Method], watch: Watch, rows: int) -> str:
    """A line a method: what a prompt and a token cost it, and the own work's shares, of which the
    lookup is what decides where decoded tokens end."""
    lines = [
        f"{rows} rows, at most {NEW_TOKENS} new tokens, one thread",
        f"  {'method':16}{'budget':>8}{'prefill ms':>12}{'own %':>8}{'token ms':>10}{'own %':>8}"
        f"{'lookup %':>10}",
    ]
    for name, method in methods.items():
        prefill = 1e3 * watch.total[name, "prefill"] / rows
        token = 1e3 * watch.total[name, "decode"] / max(watch.rows[name], 1)
        shares = [100 * watch.share(name, phase) for phase in PHASES]
        over = " over" if max(shares) > ALLOWED else ""
        lines.append(
            f"  {name:16}{method.budget:8.3f}{prefill:12.1f}{shares[0]:8.2f}{token:10.2f}"
            f"{shares[1]:8.2f}{100 * watch.lookup(name):10.2f}{over}"
        )
    return "\n".join(lines)
