"""Errors a user can act on: one line that says what, where, why and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PaskError(Exception):
    """Bad input (config, data file, model folder, method name, ...), told in one line.

    `what` happened, `where` (file, key, row), `why` (the cause as far as it is known) and
    `todo`, the user's next step. The command line prints it without a traceback, exit code 2.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", why: str = "", todo: str = "") -> None:
        self.what, self.where, self.why, self.todo = what, where, why, todo
        head = ": ".join(part for part in (where, what) if part)
        line = "; ".join(part for part in (head, why, todo) if part)
        super().__init__(" ".join(line.split()))


class HarnessFault(PaskError):
    """The harness itself is at fault (the official checker raised, an invariant broke).

    Never counted as a wrong answer of the model: the run stops, exit code 3.
    """

    exit_code = 3


def known_names(word: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: `did you mean 'full'? known: full, snapkv`."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
