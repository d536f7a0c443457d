"""A progress line for long steps: at least one every half minute, readable in a log file."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """Prints `what: done/total items, items/s, ETA, <detail>` to stderr.

    A thread prints every `interval` seconds, so a slow item does not silence the log. `done` items
    that a previous run left behind count as done, not as speed.
    """

    def __init__(self, what: str, total: int, done: int = 0, interval: float = 30.0) -> None:
        self.what, self.total, self.done, self.interval = what, total, done, interval
        self.detail = ""
        self._resumed = done
        self._start = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def advance(self, items: int = 1, detail: str = "") -> None:
        self.done += items
        self.detail = detail or self.detail

    def line(self) -> str:
        elapsed = time.monotonic() - self._start
        fresh = self.done - self._resumed
        rate = fresh / elapsed if elapsed > 0 else 0.0
        left = self.total - self.done
        eta = f"ETA {_span(left / rate)}" if rate and left else f"{_span(elapsed)} so far"
        parts = [f"{self.done}/{self.total} items", f"{rate:.2f} items/s", eta]
        if self._resumed:
            parts.insert(1, f"{self._resumed} from before")
        if self.detail:
            parts.append(self.detail)
        return f"{self.what}: {', '.join(parts)}"

    def _tick(self) -> None:
        while not self._stop.wait(self.interval):
            self._print()

    def _print(self) -> None:
        print(self.line(), file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        self._print()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self._print()
