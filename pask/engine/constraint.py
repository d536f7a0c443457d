"""Grammar masks of a batch: which tokens are legal next, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xgrammar as xgr

from pask.errors import PaskError


class LegalTokens:
    """The legal next tokens of several grammar matchers, one row each."""

    def __init__(self, matchers: Sequence[xgr.GrammarMatcher], vocab_size: int) -> None:
        self._masks = xgr.allocate_token_bitmask(len(matchers), vocab_size)
        xgr.BatchGrammarMatcher(max_threads=1).batch_fill_next_token_bitmask(
            list(matchers), self._masks
        )
        self._words = self._masks.numpy().view(np.uint32)
        self.counts: list[int] = np.bitwise_count(self._words).sum(axis=1, dtype=int).tolist()

    def only(self, row: int) -> int:
        """The one legal token of a row whose count is 1."""
        words = self._words[row]
        word = int(words.nonzero()[0][0])
        return 32 * word + int(words[word]).bit_length() - 1

    def mask(self, row: int) -> torch.Tensor:
        """A row's bitmask, [words] int32, to hand to `best` later."""
        return self._masks[row]


def best(masks: Sequence[torch.Tensor], logits: torch.Tensor, who: Sequence[str]) -> list[int]:
    """The legal token of the highest logit for each row, the lowest id among equals.

    `masks`: a row's bitmask each; `logits` [rows, vocab] fp32, overwritten with -inf where a token
    is not legal; `who` names the rows. PaskError where the best of a row is not finite.
    """
    xgr.apply_token_bitmask_inplace(logits, torch.stack(list(masks)))
    highest = logits.max(dim=-1)
    finite = torch.isfinite(highest.values)
    if not bool(finite.all()):  # argmax would take the first NaN
        raise PaskError(
            "the model's logits are not finite",
            where=who[int(finite.int().argmin())],
            todo="check its weights, or set kv_dtype to bfloat16 or float32",
        )
    return highest.indices.tolist()
