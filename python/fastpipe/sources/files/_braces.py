"""Alternatives in paths, as shells have them: `part-{0,1}.avro` stands for two names."""

from __future__ import annotations

from fastpipe.errors import LimitError

__all__ = ["alternatives"]

_MOST_ALTERNATIVES = 10_000
_MOST_BRACES = 64


def alternatives(text: str) -> list[str]:
    """What a text with `{a,b}` stands for, in the order in which a shell lists it; of any other text the text itself.

    Alternatives may hold alternatives. Braces without a comma between them, and those that nothing closes, are
    characters like others: `{1..3}` isn't expanded.

    Raises:
        LimitError: if there are more than 64 opening braces, or 10,000 alternatives.
    """
    if text.count("{") > _MOST_BRACES:
        raise _too_many(f"more than {_MOST_BRACES} opening braces", text)
    at = text.find("{")
    while at >= 0:
        if (group := _group(text, at)) is not None:
            parts, end = group
            tails = alternatives(text[end:])
            middles = [middle for part in parts for middle in alternatives(part)]
            if len(middles) * len(tails) > _MOST_ALTERNATIVES:
                raise _too_many(f"more than {_MOST_ALTERNATIVES} alternatives", text)
            return [text[:at] + middle + tail for middle in middles for tail in tails]
        at = text.find("{", at + 1)
    return [text]


def _group(text: str, start: int) -> tuple[list[str], int] | None:
    """The parts between the brace at `start` and the one that closes it, and where what is behind begins.

    None if nothing closes it, or no comma separates parts.
    """
    parts: list[str] = []
    depth, begin = 0, start + 1
    for i in range(start, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "," and depth == 1:
            parts.append(text[begin:i])
            begin = i + 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return ([*parts, text[begin:i]], i + 1) if parts else None
    return None


def _too_many(what: str, text: str) -> LimitError:
    reason = f"{what} in a path: list the paths instead"
    return LimitError(f"{reason} (file {text[:200]})", path=text, reason=reason)
