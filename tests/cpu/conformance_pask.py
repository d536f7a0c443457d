"""PASK's bytes a second time: its chain walked token by token, then Algorithm 2 on plain tables.

The policy is made up, for a model of two layers, each a group.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from pask.methods.contract import PromptInfo
from pask.methods.levels import Level
from pask.policy.path import greedy_path
from pask.policy.policy import Policy, SidePolicy
from pask.structure.buckets import LayerBucket
from pask.structure.labels import Label
from tests.cpu.conformance_sizes import PAGE, Sizes, sizes
from tests.cpu.pask_policies import LAYOUT, VALUE, H, L, R, evidence
from tests.cpu.test_pask_plan import slow_chain

SELECTOR = "function_selector/free/critical"
FED = 24  # decoded tokens: enough to pay for a ring of 16 slots
COSTS = {R: Fraction(0), L: Fraction(5, 16), H: Fraction(1)}


def _side(
    name: str,
    buckets: dict[str, tuple[float, list[tuple[float, float]], tuple[Level, Level]]],
    steps: int,
    alpha: float,
) -> SidePolicy:
    """`buckets`: tokens a row, D at R and at L in both groups, and the floors."""
    found = evidence(
        name,
        (1, 1),
        {
            LayerBucket(one, group): (tokens, distortion[group])
            for one, (tokens, distortion, _) in buckets.items()
            for group in (0, 1)
        },
    )
    floors = {q.bucket: buckets[q.bucket.name][2][q.bucket.group] for q in found.buckets}
    path = greedy_path(found, floors)
    return SidePolicy(found, None, "distortion", floors, path, steps, (), alpha)


def made_up_policy() -> Policy:
    """Every label but `type` has evidence; the last texts of a prompt may not be released."""
    decode = {
        # rho_D, group by group: R -> L 14.7 and 7.0, L -> H 2.0 and 2.6.
        VALUE: (6.0, [(3.0, 0.7), (2.0, 0.9)], (R, R)),
        SELECTOR: (1.0, [(9.0, 2.5), (8.0, 2.7)], (L, L)),
        LAYOUT: (5.0, [(0.2, 0.1), (0.3, 0.15)], (R, R)),
    }
    prompt = {
        label.value: (4.0 + n, [(1.0 + n / 7, 0.3), (2.0 + n / 5, 0.4 + n / 9)], (R, R))
        for n, label in enumerate(Label)
        if label is not Label.TYPE
    }
    for label, floors in {"user": (L, L), "chat_scaffold": (L, R), "required": (R, L)}.items():
        prompt[label] = (*prompt[label][:2], floors)
    return Policy(
        made_for={},
        layers=2,
        layer_groups=(0, 1),
        coarsening="role_choice_next",
        recent=4,
        beta=0.9,
        decode=_side("decode", decode, 2, 0.05),
        prompt=_side("prompt", prompt, 3, 0.02),
        reserve={VALUE: 0.437, SELECTOR: 1.119, LAYOUT: 0.053},
        margin=1.25,
    )


def window(method: Any, info: PromptInfo) -> int:
    """The last prompt tokens that the chain, walked slowly, keeps in every layer group."""
    if method.setting >= 1:
        return info.prompt_tokens
    _, _, (_, prompt, *_) = _choice(method, info)
    kept = 0
    for levels in reversed(list(zip(*prompt, strict=True))):
        if min(levels) is R:
            break
        kept += 1
    assert kept >= 1  # the last one is always there
    return kept


def _choice(method: Any, info: PromptInfo) -> tuple[list[Any], float, Any]:
    """The chain, the slots that the knob allows, and the choice that PASK has to make."""
    letter, prompt_first = method.prompt_path == "distortion", method.share == "prompt_first"
    chain = slow_chain(method.policy, info, method.sinks, letter, prompt_first)
    allowed = method.setting * chain[-1][0]
    within = [one for one in chain if one[0] <= allowed + 1e-9]
    least = min(one[0] for one in chain) + 1e-9
    return chain, allowed, (within or [one for one in chain if one[0] <= least])[-1]


def resident(method: Any, info: PromptInfo, decoded: int) -> int:
    """Of an answer all of whose tokens are values, which are critical."""
    chain, allowed, (slots, prompt, acts, own, floored) = _choice(method, info)
    levels = [[H] * decoded, [H] * decoded]
    if acts:
        margin = method.policy.margin
        selected = next(one[3] for one in chain if not one[4])
        remaining = margin * own + allowed - slots
        if floored or any(level < H for row in prompt for level in row):
            remaining = min(remaining, margin * selected)
        ahead = margin * chain[0][3], margin * (selected if floored else own)
        levels = _answer(method.policy, max(0.0, remaining), ahead, decoded)
    low = acts or any(level is L for row in prompt for level in row)
    return _bytes(method, info, prompt, levels) + (sizes(info).statistics() if low else 0)


def resident_decode(method: Any, info: PromptInfo, decoded: int) -> int:
    """With a whole prompt and no budget: every value as the policy has selected it, L and R."""
    prompt = [[H] * info.prompt_tokens] * 2
    levels = [[L] * decoded, [R] * decoded]
    return _bytes(method, info, prompt, levels) + sizes(info).statistics()


def _bytes(
    method: Any, info: PromptInfo, prompt: list[list[Level]], answer: list[list[Level]]
) -> int:
    """Of a prompt and an answer by group, without the statistics of keys."""
    layer = Sizes(1, info.kv_heads, info.head_dim)
    total = 0
    for kept, ends in zip(prompt, answer, strict=True):
        left = ends[: max(len(ends) - 1 - method.recent, 0)]  # the others wait, or are at HIGH
        total += layer.high(kept.count(H) + ends.count(H))
        total += layer.low(kept.count(L) + left.count(L), 4)
        total += layer.high(PAGE if any(level < H for level in ends) else 0)
    return total


def _answer(
    policy: Policy, remaining: float, ahead: tuple[float, float], decoded: int
) -> list[list[Level]]:
    """Algorithm 2 for values alone: by group, where each token ends."""
    table = {q.bucket.group: q for q in policy.decode.evidence.buckets if q.bucket.name == VALUE}
    order, ends = [R, L, H], []

    def ratio(group: int, level: Level) -> float:
        """What a step up from `level` saves of distortion, by its cost."""
        above = order[order.index(level) + 1]
        saved = table[group].distortion[level] - table[group].distortion[above]
        return saved / float(COSTS[above] - COSTS[level])

    def cost(levels: list[Level]) -> Fraction:
        return sum((COSTS[level] for level in levels), Fraction(0)) / 2

    for number in range(1, decoded + 1):
        levels = [policy.decode.table[LayerBucket(VALUE, group)] for group in (0, 1)]
        floors, selected = ahead[0], ahead[1] - number * float(cost(levels))  # the floors are free
        budget = max(0.0, remaining - min(policy.reserve[VALUE], max(0.0, floors)))
        spare = min(budget, remaining - max(0.0, selected))
        while cost(levels) > budget and max(levels) > R:  # the floors are R
            downs = [(ratio(g, order[order.index(a) - 1]), g) for g, a in enumerate(levels) if a]
            group = min(downs)[1]
            levels[group] = order[order.index(levels[group]) - 1]
        while True:
            ups = []
            for group, level in enumerate(levels):
                if level < H:
                    higher = [*levels]
                    higher[group] = order[order.index(level) + 1]
                    if cost(higher) <= spare:
                        ups.append((ratio(group, level), higher))
            if not ups:
                break
            levels = max(ups)[1]
        remaining -= float(cost(levels))
        ends.append(levels)
    return [list(group) for group in zip(*ends, strict=True)]
