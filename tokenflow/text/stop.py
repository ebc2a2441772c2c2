"""Stop strings in a growing text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class TextStep(NamedTuple):
    """Text that may be shown now, and whether a stop string ended the text."""

    text: str
    stopped: bool


class StopMatcher:
    """Finds the first stop string to be complete, however the text is cut into pieces.

    The text ends at the character that completes a stop string; where several are complete at that
    character, the one that begins first decides.  Nothing of it is shown.  Of text that may still become a
    stop string, exactly the longest such suffix is held back.

    :param stops: non-empty strings; none means that all text passes.
    """

    __slots__ = ("_firsts", "_held", "_patterns", "_states", "matched")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._patterns = [(stop, _borders(stop)) for stop in dict.fromkeys(stops)]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(self._patterns)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, may_stop: bool = True) -> TextStep:
        """Take the next piece of text; after a stop, all that follows is swallowed.

        :param may_stop: stop strings that this piece completes end the text, rather than belong to it.
        """
        if self.matched is not None:
            return TextStep("", True)
        if not self._held and self._firsts.isdisjoint(text):
            return TextStep(text, False)
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            matched = self._advance(character)
            if matched is not None and may_stop:
                self.matched = matched
                self._held = ""
                return TextStep(seen[: end - len(matched)], True)
        certain = len(seen) - max(self._states)
        self._held = seen[certain:]
        return TextStep(seen[:certain], False)

    def flush(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._patterns)
        return held

    def _advance(self, character: str) -> str | None:
        """Move every pattern on; return the longest one that is complete."""
        matched: str | None = None
        for index, (stop, borders) in enumerate(self._patterns):
            state = self._states[index]
            while state and stop[state] != character:
                state = borders[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                matched = max(matched or "", stop, key=len)
                state = borders[-1]
            self._states[index] = state
        return matched


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix (Knuth, Morris,
    Pratt 1977, section 2)."""
    borders = [0]
    length = 0
    for character in pattern[1:]:
        while length and pattern[length] != character:
            length = borders[length - 1]
        if pattern[length] == character:
            length += 1
        borders.append(length)
    return borders
