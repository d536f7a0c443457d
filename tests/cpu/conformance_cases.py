"""What the conformance tests know of each method: the bytes it takes, worked out from its paper and
its docstring a second time, and how many of the latest prompt tokens it must keep.

A method that is not in `CASES` fails the tests until somebody has thought about it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pask.bench.methods import MadeUpEvidence
from pask.methods.contract import Method, PromptEvidence, PromptInfo
from pask.methods.pask import PASK
from pask.methods.registry import make_method, method_class
from pask.structure.labels import Label
from tests.cpu import conformance_pask
from tests.cpu.conformance_sizes import PAGE, sizes

LENGTHS = tuple(sorted({*range(1, 65, 3), 2, 15, 17, 32, 33, 63, 65, 96, 97, 128, 2000}))
FEWER_LENGTHS = (*LENGTHS[:-1:3], 130, 200, 250, 400)  # for those whose answers have to be longer
FREE = (PAGE - 1) / 2  # slots of a last page, on average over the lengths


Formula = Callable[[Any, PromptInfo, int], int]
"""(method, prompt, decoded tokens that were fed) -> resident bytes at the end of the request."""


@dataclass(frozen=True)
class Case:
    """`window`: so many of the last prompt tokens are resident after the prefill. `fed`: decoded
    tokens after which its bytes are looked at, as many as it takes to see all that it does.
    `lengths`: of the prompts that they are looked at for."""

    resident: Formula
    window: Callable[[Any, PromptInfo], int]
    fed: int = 5
    lengths: Sequence[int] = LENGTHS


def _full(method: Any, info: PromptInfo, decoded: int) -> int:
    return sizes(info).high(info.prompt_tokens + decoded)


def _append_only(method: Any, info: PromptInfo) -> int:
    """Prompt tokens kept where the whole answer stays: C + T + s = setting (P + T + s)."""
    setting, prompt = method.setting, info.prompt_tokens
    wanted = setting * prompt - (1 - setting) * (info.expected_new_tokens + FREE)
    return min(prompt, max(round(wanted), method.min_tokens))


def _snapkv(method: Any, info: PromptInfo, decoded: int) -> int:
    return sizes(info).high(_append_only(method, info) + decoded)


def _snapkv_window(method: Any, info: PromptInfo) -> int:
    kept = _append_only(method, info)
    return kept if kept == info.prompt_tokens else min(method.window, max(1, kept // 4))


def _bounded(method: Any, info: PromptInfo) -> int:
    """Tokens kept where the answer is evicted from too: C + s = setting (P + T + s)."""
    if method.setting >= 1:
        return 10**9
    total = info.prompt_tokens + info.expected_new_tokens + FREE
    return max(round(method.setting * total - FREE), method.min_tokens)


def _evicting(method: Any, info: PromptInfo, decoded: int) -> int:
    return sizes(info).high(min(info.prompt_tokens + decoded, _bounded(method, info)))


def _last_of(
    share: Callable[[Any, int], int],
) -> Callable[[Any, PromptInfo], int]:
    """The window of a method that keeps C tokens: the whole prompt where it fits."""

    def window(method: Any, info: PromptInfo) -> int:
        kept = _bounded(method, info)
        return info.prompt_tokens if info.prompt_tokens <= kept else share(method, kept)

    return window


def _transattn_last(method: Any, kept: int) -> int:
    return min(max(method.recent_min, int(method.recent_share * kept)), max(1, kept // 2))


def _pages(slots: int) -> int:
    return -(-slots // PAGE)


def _chunks(method: Any, stored: int) -> int:
    return -(-stored // method.chunk)


def _rocketkv_kept(method: Any, info: PromptInfo) -> int | None:
    """Prompt tokens in the store; None for all of them, without summaries."""
    prompt, answer, chunk = info.prompt_tokens, info.expected_new_tokens, method.chunk
    paid = method.setting * (prompt + answer + FREE) - 2 * FREE - (chunk - 1) / (2 * chunk)
    stored = max(round(paid / (1 + 1 / chunk) - answer), method.min_tokens)
    pages = sum(map(_pages, (stored + answer, _chunks(method, stored + answer))))
    whole = method.setting >= 1 or stored >= prompt or pages >= _pages(prompt + answer)
    return None if whole else stored


def _rocketkv(method: Any, info: PromptInfo, decoded: int) -> int:
    kept = _rocketkv_kept(method, info)
    if kept is None:
        return sizes(info).high(info.prompt_tokens + decoded)
    # A chunk's summary is a slot: a minimum and a maximum in place of key and value.
    chunks = _chunks(method, kept + decoded)
    return sizes(info).high(kept + decoded) + sizes(info).high(chunks)


def _rocketkv_window(method: Any, info: PromptInfo) -> int:
    kept = _rocketkv_kept(method, info)
    return info.prompt_tokens if kept is None else min(method.window, max(1, kept // 4))


def _uniform(bits: int) -> Formula:
    def resident(method: Any, info: PromptInfo, decoded: int) -> int:
        prompt = info.prompt_tokens
        if method.keys == "channel":  # what is left of whole groups stays, and the answer
            left = prompt % 32
            return sizes(info).channel2(prompt - left) + sizes(info).high(left + decoded)
        return sizes(info).low(prompt + decoded, bits) + sizes(info).statistics()

    return resident


def _triaxialkv(method: Any, info: PromptInfo, decoded: int) -> int:
    """Bbits - 2 halves of the prompt at 4 bit, the rest at 2 bit in whole groups of 32."""
    prompt = info.prompt_tokens
    int2 = (prompt - math.floor((method.setting - 2) / 2 * prompt + 1e-9)) // 32 * 32
    return sizes(info).channel2(int2) + sizes(info).low(prompt - int2 + decoded, 4)


def _rlh_tags(info: PromptInfo) -> dict[str, int]:
    """Prompt tokens by tag: before the user's first word, or from it on; and whose they are."""
    assert info.labels is not None
    counts: Counter[str] = Counter()
    when = "older"
    for label in info.labels:
        when = "current" if label == Label.USER else when
        whose = {Label.USER: "user", Label.CHAT_SCAFFOLD: "delim"}.get(label, "inst")
        counts[f"{when}|{whose}"] += 1
    return counts


def _rlh(method: Any, info: PromptInfo, decoded: int) -> int:
    """Release -> 4 bit -> 16 bit, one token after the other, the best distortion a byte first."""
    tags = _rlh_tags(info)
    ranked: list[tuple[float, str, str]] = []
    for tag, released, low4, count in method.sensitivity:
        first, second = (released - low4) / (5 / 16), low4 / (11 / 16)
        if first >= second:
            ranked += [(-first / count, tag, "RL"), (-second / count, tag, "LH")]
        else:
            ranked.append((-released / count, tag, "RH"))
    known = {row[0] for row in method.sensitivity}
    steps = [(0.0, tag, "RH") for tag in sorted(tags) if tag not in known] + sorted(ranked)
    held = Counter({"R": info.prompt_tokens})
    prefixes: list[tuple[float, int, int]] = []  # slots held, tokens in 16 bit and at 4 bit
    for _, tag, (before, after) in steps:
        for _ in range(tags.get(tag, 0)):
            held[before] -= 1
            held[after] += 1
            high = _pages(held["H"] + info.expected_new_tokens) * PAGE
            low = _pages(held["L"]) * PAGE * 5 / 16 + (held["L"] > 0)
            prefixes.append((high + low, held["H"], held["L"]))
    allowed = method.setting * _pages(info.prompt_tokens + info.expected_new_tokens) * PAGE
    allowed = max(allowed, min(prefixes)[0])  # one token stays: the least that can be held
    _, high, low = [one for one in prefixes if one[0] <= allowed][-1]
    there = sizes(info).high(high + decoded) + sizes(info).low(low, 4)
    return there + (sizes(info).statistics() if low else 0)


def _all(method: Any, info: PromptInfo) -> int:
    return info.prompt_tokens


CASES: dict[str, Case] = {
    "full": Case(_full, _all),
    "h2o": Case(_evicting, _last_of(lambda method, c: c - math.floor(method.heavy_share * c))),
    "pask": Case(
        conformance_pask.resident, conformance_pask.window, conformance_pask.FED, FEWER_LENGTHS
    ),
    "pask_decode": Case(
        conformance_pask.resident_decode, _all, conformance_pask.FED, FEWER_LENGTHS
    ),
    "random": Case(_evicting, _last_of(lambda method, c: min(method.recent, max(1, c // 2)))),
    "rocketkv": Case(_rocketkv, _rocketkv_window),
    "sinks_recent": Case(_evicting, _last_of(lambda method, c: c - min(method.sinks, c - 1))),
    "snapkv": Case(_snapkv, _snapkv_window),
    "transattn": Case(_evicting, _last_of(_transattn_last)),
    "transattn_fast": Case(_evicting, _last_of(_transattn_last)),
    "triaxialkv": Case(_triaxialkv, _all),
    "triaxialkv_rlh": Case(_rlh, lambda method, info: 0),  # it may release any tag
    "uniform_int2": Case(_uniform(2), _all),
    "uniform_int4": Case(_uniform(4), _all),
    "uniform_int8": Case(_uniform(8), _all),
}


def labels_for(prompt: int) -> tuple[Label, ...]:
    """Every label in stretches, the user's words last but one, as in a real prompt."""
    order = [Label.CHAT_SCAFFOLD, *(x for x in Label if x is not Label.USER), Label.USER]
    last = [Label.CHAT_SCAFFOLD] * min(prompt, 3)
    rest = prompt - len(last)
    return (*(order[n * len(order) // rest] for n in range(rest)), *last)


def info_for(prompt: int, **more: Any) -> PromptInfo:
    """A prompt of so many tokens for a model of 2 layers, 2 kv heads and 4 query heads of 32."""
    words = (b'{"', b"name", b'": "', b"get", b"_w", b'", "', b"city", b" of ", b"Rome", b"}")
    given: dict[str, Any] = {
        "layers": 2,
        "kv_heads": 2,
        "group_size": 2,
        "head_dim": 32,
        "expected_new_tokens": 24,
        "page_slots": PAGE,
        "labels": labels_for(prompt),
        "texts": tuple(words[n % len(words)] for n in range(prompt)),
    }
    return PromptInfo(prompt_tokens=prompt, **(given | more))


@cache
def measured(name: str) -> Mapping[str, Any] | None:
    """The fields that a method's calibration gives, on evidence that nobody measured."""
    cls = method_class(name)
    if issubclass(cls, PASK):
        return {"policy": conformance_pask.made_up_policy()}
    if not cls.calibrated:
        return None
    evidence: list[PromptEvidence] = [MadeUpEvidence(info_for(n)) for n in (90, 200)]
    return make_method(name, None).calibrate(evidence)


def method(name: str, budget: float | None = None, nominal: float | None = None) -> Method:
    """A method of the registry, calibrated where it has to be."""
    return make_method(name, budget, nominal=nominal, measured=measured(name))


def budgets(name: str) -> list[float]:
    """The tightest budget of a method, a third or what comes nearest, and the loosest."""
    low, high = method_class(name).budgets
    return sorted({low, min(max(0.33, low), high), high})
