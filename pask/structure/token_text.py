"""Which part of a text each of its tokens stands for, proven byte by byte.

A fast tokenizer's offsets are not used: they count characters (tokens that split one overlap), may
leave out blanks, and point astray after a normaliser. Instead the tokens' own bytes, one after the
other, have to spell the text. Four differences are known and allowed, each checked on the whole
text: a blank put before a stretch of text (at its beginning, after an added token), blanks that an
added token takes with it, Unicode's NFC form, and `▁` for a blank. Anything else, such as a word
unknown to the tokenizer or written in lower case, is refused.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise, product
from typing import Protocol

from pask.errors import PaskError
from pask.structure.labels import Label, token_labels

_BLANK_MARK = "▁"  # how SentencePiece writes a blank

Place = tuple[int, int]  # a first byte and the one after the last


class AddedToken(Protocol):
    """What is needed of a token that is matched as a whole, such as `<|im_start|>`.

    `lstrip`, `rstrip`: it takes the blanks before it, after it.
    """

    @property
    def content(self) -> str: ...

    @property
    def lstrip(self) -> bool: ...

    @property
    def rstrip(self) -> bool: ...


class TokenText:
    """The text of one tokenizer's tokens.

    `vocabulary`: the bytes of every token id, as xgrammar decodes them; `added`: the tokenizer's
    `added_tokens_decoder`, whose ids stand for their `content`.
    """

    def __init__(self, vocabulary: Sequence[bytes], added: Mapping[int, AddedToken]) -> None:
        self._bytes = dict(enumerate(vocabulary))
        self._bytes |= {token_id: token.content.encode() for token_id, token in added.items()}
        self._added = dict(added)

    def labels(self, pieces: Sequence[tuple[Label, str]], ids: Sequence[int]) -> tuple[Label, ...]:
        """One label for each of the ids that the tokenizer made of the pieces' joined text.

        Blanks that an added token took with it decide no label. PaskError where the tokens do not
        spell the text; KeyError for an id outside the vocabulary.
        """
        tokens = [self._bytes[token_id] for token_id in ids]
        furthest = _Differs(-1, b"", b"")
        for blank_marks, nfc in product((False, True), repeat=2):
            read = [(label, _read(text, nfc, blank_marks)) for label, text in pieces]
            text = b"".join(part for _, part in read)
            try:
                places = self._places(text, ids, _blanked(tokens) if blank_marks else tokens)
            except _Differs as difference:
                furthest = max(furthest, difference, key=lambda found: found.position)
            else:
                return token_labels(((label, len(part)) for label, part in read), places)
        raise PaskError(
            "the tokens do not spell the prompt, so they cannot be labelled",
            why=str(furthest),
            todo="use a tokenizer that keeps all of the text: byte-level BPE, or SentencePiece "
            "with byte fallback",
        )

    def _places(self, text: bytes, ids: Sequence[int], tokens: Sequence[bytes]) -> list[Place]:
        """The bytes of the text that each token stands for."""
        if b"".join(tokens) == text:
            return _in_a_row(0, map(len, tokens))
        places: list[Place] = []
        position = 0
        pairs = zip(ids, tokens, strict=True)
        for added, group in groupby(pairs, key=lambda pair: pair[0] in self._added):
            if added:
                for token_id, content in group:
                    token = self._added[token_id]
                    start = position + (_blanks(text[position:]) if token.lstrip else 0)
                    if not text.startswith(content, start):
                        raise _Differs(position, text, content)
                    position = start + len(content)
                    places.append((start, position))
                    position += _blanks(text[position:]) if token.rstrip else 0
            else:
                sizes = _sizes(text, position, [token for _, token in group])
                places += _in_a_row(position, sizes)
                position += sum(sizes)
        if position != len(text):
            raise _Differs(position, text, b"")
        return places


def _in_a_row(position: int, sizes: Iterable[int]) -> list[Place]:
    bounds = accumulate(sizes, initial=position)
    return list(pairwise(bounds))


def _sizes(text: bytes, position: int, tokens: Sequence[bytes]) -> list[int]:
    """How many bytes of the text each token of a stretch of ordinary ones stands for."""
    sizes = list(map(len, tokens))
    spelled = b"".join(tokens)
    if text.startswith(spelled, position):
        return sizes
    if tokens[0].startswith(b" ") and text.startswith(spelled[1:], position):
        sizes[0] -= 1
        return sizes
    differences = [_Differs(position, text, s) for s in (spelled, spelled.removeprefix(b" "))]
    raise max(differences, key=lambda found: found.position)


class _Differs(Exception):
    """Up to a position the tokens spell the text."""

    def __init__(self, position: int, text: bytes, tokens: bytes) -> None:
        text = text[position:]
        pairs = enumerate(zip(text, tokens, strict=False))
        shorter = min(len(text), len(tokens))
        same = next((at for at, (ours, theirs) in pairs if ours != theirs), shorter)
        self.position = position + same
        rest, wrong = text[same:], tokens[same:]
        super().__init__(f"the text goes on with {_shown(rest)}, the tokens with {_shown(wrong)}")


def _blanks(text: bytes) -> int:
    """Bytes of white space at the beginning."""
    rest = text.decode(errors="surrogateescape").lstrip()
    return len(text) - len(rest.encode(errors="surrogateescape"))


def _read(text: str, nfc: bool, blank_marks: bool) -> bytes:
    if nfc:
        text = unicodedata.normalize("NFC", text)
    return (text.replace(_BLANK_MARK, " ") if blank_marks else text).encode()


def _blanked(tokens: Sequence[bytes]) -> list[bytes]:
    return [token.replace(_BLANK_MARK.encode(), b" ") for token in tokens]


def _shown(part: bytes) -> str:
    return repr(part[:20].decode(errors="replace")) if part else "nothing"
