"""The loop one writes first: transformers, xgrammar and a method, one answer at a time.

Every answer has its own prefill. A method sees what it asks for through an attention function that
stands in for transformers' own, and what it drops is cut out of transformers' cache. Nothing of
this engine runs but the method itself, so the loop is an oracle for its answers too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xgrammar as xgr
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pask.engine.generation import Request
from pask.methods.contract import Captures, Method, PromptInfo
from pask.methods.levels import Level


class PlainLoop:
    """One model in transformers, in fp32; answers for Full KV and for methods that keep a part of
    the prompt in 16 bit and everything decoded."""

    def __init__(self, folder: Path, *, page_slots: int = 16) -> None:
        name = f"sdpa_watched_{id(self)}"  # the registry is one for all models
        AttentionInterface.register(name, self._attention)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=name
        )
        self._page_slots = page_slots
        self._window = 0  # late queries whose probabilities are wanted
        self._mass: list[torch.Tensor] = []  # by layer, [q_heads, prompt tokens]

    @torch.inference_mode()
    def answer(
        self, request: Request, method: Method, expected_new_tokens: int, limit: int
    ) -> tuple[int, ...]:
        """The greedy answer, without the stop token."""
        matcher = xgr.GrammarMatcher(request.grammar)
        vocab_size = request.grammar.tokenizer_info.vocab_size
        bitmask = xgr.allocate_token_bitmask(1, vocab_size)
        prompt = len(request.prompt_ids)
        past, logits = self._prefill(request, method, expected_new_tokens)
        answer: list[int] = []
        while True:
            matcher.fill_next_token_bitmask(bitmask)
            xgr.apply_token_bitmask_inplace(logits, bitmask)
            token = int(logits.argmax())
            matcher.accept_token(token)
            if matcher.is_terminated():
                return tuple(answer)
            answer.append(token)
            if len(answer) == limit:
                return tuple(answer)
            out = self._model(
                torch.tensor([[token]]),
                past_key_values=past,
                position_ids=torch.tensor([[prompt + len(answer) - 1]]),
                use_cache=True,
            )
            logits = out.logits[:, -1]

    def _prefill(
        self, request: Request, method: Method, expected_new_tokens: int
    ) -> tuple[Any, torch.Tensor]:
        config = self._model.config
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        info = PromptInfo(
            prompt_tokens=len(request.prompt_ids),
            layers=config.num_hidden_layers,
            kv_heads=kv_heads,
            group_size=heads // kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            expected_new_tokens=expected_new_tokens,
            page_slots=self._page_slots,
            labels=request.prompt_labels,
        )
        state = method.open(info)
        more = state.acts_on_tokens or state.evicts or state.levels or state.choice is not None
        if more or state.wants.prompt_mass:
            raise ValueError(f"the plain loop cannot run {method.name}")
        self._window, self._mass = state.wants.window_queries, []
        out = self._model(torch.tensor([request.prompt_ids]), use_cache=True, logits_to_keep=1)
        self._window = 0
        for number, layer in enumerate(out.past_key_values.layers):
            mass = self._mass[number] if self._mass else None
            kept = state.place(number, Captures(window_mass=mass)).tokens
            if kept is not None:
                index = kept[Level.HIGH][None, :, :, None].expand(-1, -1, -1, info.head_dim)
                layer.keys = layer.keys.gather(2, index)
                layer.values = layer.values.gather(2, index)
        return out.past_key_values, out.logits[:, -1]

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        if self._window:
            self._mass.append(_late_mass(query[0], key[0], self._window))
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        return out, None


def _late_mass(q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    """[q_heads, prompt]: what the last `window` queries attend to, softmaxes summed."""
    prompt = q.shape[1]
    late = q[:, -window:]
    keys = k.repeat_interleave(len(q) // len(k), dim=0)
    scores = late @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
    first = prompt - late.shape[1]
    later = torch.arange(prompt) > torch.arange(first, prompt)[:, None]
    return torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1).sum(dim=1)
