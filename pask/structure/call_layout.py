"""The text that stands around the calls of an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallLayout:
    """The text around calls: `begin open CALL close separator open CALL close ... end`."""

    begin: str = ""
    open: str = ""
    close: str = ""
    separator: str = ""
    end: str = ""
