"""PASK: persistence by structure, measured once per model and looked up token by token.

Source: "Parser States Already Know: Structure-Conditioned KV Persistence for Structured
Generation", sections 3.2 to 3.5, Equations 8 to 10, Algorithm 2. Calibration gives every bucket
(a tag of the answer or a label of the prompt, with a layer group) a floor from task failures and a
rank for more from attention's distortion; here that policy is followed within a request's budget.
Nothing of attention is seen.

The knob is the share S of a request's bytes over Full KV's, at the expected answer length T. The
answer's share is what its selected candidate (Equation 8) is expected to take, the rest is the
prompt's (`pask.methods.pask_plan`). Each accepted token then starts from its selected levels and
goes down to no less than its floors where R_t - Gamma(s_t) does not pay for them, or up where the
next byte is a critical choice or near one (`pask.policy.lookup`). R_{t+1} is R_t less the token's
own cost.

Deviations and open choices:
- the paper gives no rule for sharing S between prompt and answer. Here the decode side has its
  selected candidate first and the prompt goes up its path, beyond or short of its own selected
  candidate, as far as S allows. Once the prompt is whole the decode side goes up its path; with
  `share` "by_distortion" the two go up side by side, whichever spares the answer more distortion by
  the byte (`pask.policy.path.worth`), after what did any harm. Where S
  does not hold the prompt's floors and the selected candidate, Algorithm 2 demotes, and where it
  does not hold the floors of both, the prompt's thresholds are loosened for this request until
  its floors fit (`pask.policy.path.path_below`; note "below_floors"). Note "unreachable" where
  what has to stay is more than S even so. With `prompt_path` "distortion" floors stay floors
  on both sides, and such a request is "unreachable";
- an upgrade of the prompt that S does not cover whole goes to the newest tokens of the label. A
  label that calibration did not see stays at HIGH, and so do the first `sinks` prompt tokens and
  the last;
- of equal ratios the cheaper upgrade comes first, then the earlier group: it has the chance to fit
  where the other does not. Measured distortions are equal where both are 0 and the order is free;
- `recent` decoded tokens beside the newest wait at HIGH, in a ring that takes whole pages of 16-bit
  slots in each layer where a token may end lower. Where the expected answer is too short for its
  candidate to save that much, the answer stays at HIGH and nothing is looked up;
- bytes are whole pages, most of what a short request takes. Its prompt may therefore get levels
  above its floors because they take fewer pages;
- with a budget for both sides the tolerance of the prompt side chooses no more than its thresholds:
  how far up the prompt goes is the budget's to say. Above the floors, buckets come first that did
  any harm, most harmful first, and only then those that distort (`SidePolicy.above`); with
  `prompt_path` "distortion" they go up by rho_D alone, as Equation 7 has it;
- Gamma(s) knows a state by its coarsened tag, wherever in the answer it is, so near an answer's end
  it keeps back more than is still to come. Here it is at most what a long answer would still
  cost at its floors, and a promotion has to leave what one would cost at its selected levels:
  both are counted down as tokens come. With Gamma(s) alone the first critical tokens take all
  that is not reserved, and the others are demoted below the candidate that was selected;
- R_0 is what a long answer takes, one that `beta` of the calibration answers do not exceed, though
  the bytes that are planned for are the mean's: budgets are met over all rows, not by each.
  `reserve` "by_state" is Algorithm 2 to the letter instead: Gamma(s) alone, and R_0 of the mean;
- a critical state, Crit(s_t), is a token whose `next` is critical or near;
- an answer longer than T runs out of budget and is demoted to its floors; a token whose bucket
  calibration did not see stays at HIGH whatever is left;
- low keys are stored freed of the prompt's channel statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import ClassVar

from pask.errors import PaskError
from pask.methods.contract import (
    UNREACHABLE,
    Captures,
    Decoded,
    Method,
    Placement,
    PromptInfo,
    RequestState,
)
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.methods.pask_plan import DecodeChain, Plan, PromptChain, plan
from pask.policy.actions import Ladder
from pask.policy.evidence import SIDES
from pask.policy.floors import Thresholds
from pask.policy.lookup import TokenLookup
from pask.policy.path import RANKINGS
from pask.policy.policy import Policy
from pask.structure.buckets import bucket_name
from pask.structure.tags import Next

BELOW_FLOORS = "below_floors"  # the note of a request whose budget the floors do not fit
FLOORS = ("task_error", "none")
DISTORTIONS = ("local", "propagated")
POSITIONS = ("affected", "all")
STAGES = ("both", "decode", "prompt")
RESERVES = ("counted_down", "by_state")
PROMPT_PATHS = ("harm_first", "distortion")
SHARES = ("prompt_first", "by_distortion")
_CRITICAL = frozenset({Next.CRITICAL, Next.NEAR})


@dataclass(frozen=True)
class PASK(Method):
    """Besides the knob, what stays at HIGH and the rules, the fields say how the policy is made.

    `recent` decoded tokens beside the newest and the first `sinks` prompt tokens stay at HIGH.
    `actions`: the ladder of levels. `floors` "none" leaves out Equation 6 and `ranking`
    "round_robin" Equation 7: the ablations; "distortion_per_byte" is a form of Equation 7 that
    counts a bucket's tokens (`pask.policy.path`). `tau`: the pairs of thresholds that are scanned,
    low and high, in per cent of rows. `alpha_decode`, `alpha_prefill`: the tolerated increases in
    the failure rate on development rows. `beta`: the quantile of the reserve. `candidates`: how
    many of each nested family are tried on development rows. `distortion` "propagated": a layer of
    Equation 4 gets what the group's lower layers made of the intervention; "local", each layer by
    itself, is the default, as it measures what is stored and not what answers it. `positions`
    "all": S(q) are all positions and not those that read a token of the bucket alone. `stages`:
    "decode" leaves the prompt whole, "prompt" the answer. `reserve` "by_state" and `prompt_path`
    "distortion": the paper's rules for one request, to the letter, where the other values deviate
    (above). `share`: what bytes beyond the selected answer are spent on first. `policy_file`:
    follow this policy, made before, instead of making one; of the fields that say how, only
    `actions` counts then. `policy`: what was read from a file.
    """

    budget: float = 0.33
    recent: int = 4
    sinks: int = 4
    actions: str = "R,L4,H"
    ranking: str = "distortion"
    floors: str = "task_error"
    tau: str = "0.5/1,1/2,2/4"
    alpha_decode: float = 0.05
    alpha_prefill: float = 0.02
    beta: float = 0.9
    candidates: int = 12
    distortion: str = "local"
    positions: str = "affected"
    stages: str = "both"
    reserve: str = "counted_down"
    prompt_path: str = "harm_first"
    share: str = "prompt_first"
    policy_file: str = ""
    policy: Policy | None = None

    name: ClassVar[str] = "pask"
    label: ClassVar[str] = "PASK"
    paper: ClassVar[str] = "Parser States Already Know, sections 3.2 to 3.5"
    color: ClassVar[str] = "#aa3377"
    marker: ClassVar[str] = "*"
    knob: ClassVar[str] = "share of Full KV's bytes"
    budgets: ClassVar[tuple[float, float]] = (0.05, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for what in ("recent", "sinks"):
            if getattr(self, what) < 0:
                raise ValueError(f"pask: {what} {getattr(self, what)} is below 0")
        for what, known in (
            ("ranking", RANKINGS),
            ("floors", FLOORS),
            ("distortion", DISTORTIONS),
            ("positions", POSITIONS),
            ("stages", STAGES),
            ("reserve", RESERVES),
            ("prompt_path", PROMPT_PATHS),
            ("share", SHARES),
        ):
            if getattr(self, what) not in known:
                names = ", ".join(known)
                raise ValueError(f"pask: {what} {getattr(self, what)!r} is none of {names}")
        for what in ("alpha_decode", "alpha_prefill", "beta"):
            if not 0 <= getattr(self, what) <= 1:
                raise ValueError(f"pask: {what} {getattr(self, what)} is outside 0..1")
        if self.candidates < 2:
            raise ValueError(f"pask: candidates {self.candidates} is below 2, a path's two ends")
        _ = self.ladder, self.thresholds
        if self.policy is not None:
            if not isinstance(self.policy, Policy):
                raise TypeError("pask: the policy is measured, leave it out of the config")
            self._check_policy(self.policy)

    def _check_policy(self, policy: Policy) -> None:
        if policy.recent != self.recent:
            raise ValueError(f"pask: recent is {self.recent}, the policy's {policy.recent}")
        for side in (policy.decode, policy.prompt):
            if side is not None and side.evidence.ladder != self.ladder:
                raise ValueError(
                    f"pask: actions are {self.ladder}, the policy's {side.evidence.ladder}"
                )

    @property
    def ladder(self) -> Ladder:
        """`actions`; ValueError where they are no ladder."""
        try:
            return Ladder.parse(self.actions)
        except PaskError as error:
            raise ValueError(f"pask: actions {self.actions!r}: {error.why}") from error

    @cached_property
    def thresholds(self) -> tuple[Thresholds, ...]:
        """The pairs of `tau` as proportions; ValueError where they are none."""
        try:
            pairs = [[float(part) for part in pair.split("/")] for pair in self.tau.split(",")]
            found = tuple(Thresholds(low / 100, high / 100) for low, high in pairs)
        except ValueError as error:
            raise ValueError(f"pask: tau {self.tau!r} is not like 0.5/1,1/2 ({error})") from error
        if not all(isfinite(pair.high) and pair.high <= 1 for pair in found):
            raise ValueError(f"pask: tau {self.tau!r} is above 100 per cent")
        return found

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that its policy has to have."""
        return SIDES[:1] if self.stages == "decode" else SIDES

    def open(self, info: PromptInfo) -> RequestState:
        if self.setting >= 1:
            return FullKV().open(info)
        policy = self.policy_for(info)
        found = plan(
            info,
            self.setting,
            self._decode_chain,
            self._prompt_chain,
            policy.decode.evidence,
            recent=self.recent,
            sinks=self.sinks,
            margin=policy.margin if self.reserve == "counted_down" else 1.0,
        )
        return _Request(self, policy, info, found)

    def policy_for(self, info: PromptInfo) -> Policy:
        """The policy; ValueError where there is none, or one for another number of layers."""
        if self.policy is None:
            raise ValueError(f"{self.name}: needs its policy: run pask policy make (or snakemake)")
        if self.policy.layers != info.layers:
            raise ValueError(
                f"{self.name}: the policy is for {self.policy.layers} layers, the model has "
                f"{info.layers}"
            )
        return self.policy

    @cached_property
    def _decode_chain(self) -> DecodeChain:
        assert self.policy is not None
        if self.stages == "prompt":
            return DecodeChain.left_alone(self.policy.decode.evidence)
        return DecodeChain.of(self.policy.decode, prompt_first=self.share == "prompt_first")

    @cached_property
    def _prompt_chain(self) -> PromptChain | None:
        assert self.policy is not None
        if self.stages == "decode" or self.policy.prompt is None:
            return None
        if self.prompt_path == "distortion":
            return PromptChain.from_floors(self.policy.prompt)
        return PromptChain.of(self.policy.prompt)

    @cached_property
    def _lookups(self) -> dict[int, TokenLookup]:
        return {}

    def lookup(self, steps: int) -> TokenLookup:
        """The decode side's table with `steps` upgrades, made once a policy."""
        assert self.policy is not None
        if steps not in self._lookups:
            side = replace(self.policy.decode, steps=steps)
            self._lookups[steps] = TokenLookup(side, self.policy.reserve)
        return self._lookups[steps]


class _Request(RequestState):
    """All kv heads and all layers of a group place the prompt alike. Of the answer it remembers
    the remaining budget alone, and what is still expected."""

    def __init__(self, method: PASK, policy: Policy, info: PromptInfo, found: Plan) -> None:
        self.recent = method.recent
        self.acts_on_tokens = found.steps is not None
        noted = {UNREACHABLE: found.unreachable, BELOW_FLOORS: found.below_floors}
        self.notes = tuple(note for note, holds in noted.items() if holds)
        self._coarsening = policy.coarsening
        self._remaining = found.remaining
        self._floors_ahead, self._selected_ahead = inf, 0.0  # what bounds nothing
        if method.reserve == "counted_down":
            self._floors_ahead, self._selected_ahead = found.floors_ahead, found.selected_ahead
        sizes = policy.decode.evidence.groups
        self._group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
        self._placements = [Placement()] * len(sizes)
        low = frozenset(level for level in method.ladder.actions if level.is_low)
        self.levels: frozenset[Level] = frozenset()
        if found.prompt is not None:
            there = [level for level in method.ladder.actions[1:] if (found.prompt == level).any()]
            self.levels = low & frozenset(there)
            self._placements = [
                Placement(
                    {
                        level: (row == level).nonzero()[:, 0].expand(info.kv_heads, -1)
                        for level in there
                    }
                    if bool((row != Level.HIGH).any())
                    else None
                )
                for row in found.prompt
            ]
        if found.steps is not None:
            self.levels = low
            self._lookup = method.lookup(found.steps)

    def place(self, layer: int, captures: Captures) -> Placement:
        return self._placements[self._group_of[layer]]

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        tag = decoded.tag
        if tag is None:
            raise ValueError("pask: the decode side needs tags, and the request has no tag grammar")
        name = bucket_name(tag, self._coarsening)
        levels, cost = self._lookup.decide(
            name,
            self._remaining,
            tag.next in _CRITICAL,
            self._floors_ahead,
            self._selected_ahead,
        )
        at_floors, selected = self._lookup.expected(name)
        self._remaining -= cost
        self._floors_ahead -= at_floors
        self._selected_ahead -= selected
        return [levels[group] for group in self._group_of]
