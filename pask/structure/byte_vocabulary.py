"""xgrammar's view of a vocabulary of single bytes: what a grammar holds, whatever the tokenizer."""

from __future__ import annotations

from functools import cache

import xgrammar as xgr

STOP = 256  # the one token that is no byte


@cache
def byte_vocabulary() -> xgr.TokenizerInfo:
    """A vocabulary of the 256 bytes, whose ids are their values, and STOP."""
    vocabulary = [bytes([byte]) for byte in range(STOP)] + [b"<stop>"]
    return xgr.TokenizerInfo(
        vocabulary, xgr.VocabType.RAW, vocab_size=STOP + 1, stop_token_ids=[STOP]
    )
