"""The text of one response: the one place where committed tokens become text.

It knows nothing of models.  It is told each committed token once, in order, whichever model wrote it, so
characters and stop strings that span a hand-off need no care elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenflow.text.detokenizer import Detokenizer
from tokenflow.text.stop import StopMatcher, TextStep
from tokenflow.text.tokenizer import Tokenizer


class Transcript:
    """Turns committed token ids into shown text.

    :param stops: strings that end the text.
    :param min_tokens: stop strings that one of the first so many tokens completes belong to the text.
    :param special: special tokens show as they are spelled.
    :param hidden: ids that never show beside the special ones, such as those that end the response.
    """

    __slots__ = ("_detokenizer", "_early", "_hidden", "_may_stop", "_shown", "_stop", "stopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        hidden: Collection[int] = (),
        *,
        min_tokens: int = 0,
        special: bool = False,
    ) -> None:
        self._early = min_tokens
        self._may_stop = not min_tokens
        self._hidden = hidden
        self._detokenizer = Detokenizer(tokenizer, special=special)
        self._stop = StopMatcher(stops)
        self._shown: list[str] = []
        self.stopped = False

    def advance(self, token_id: int) -> TextStep:
        """Take the next committed token: the text it adds, and whether a stop string is now complete.

        The text is empty while a character or a possible stop string is incomplete, and the token that
        decides brings what was held.  Tokens after a stop string add nothing.

        :raises ValueError: for an id outside the vocabulary.
        """
        self._may_stop = not self._early
        if self._early:
            self._early -= 1
        if token_id in self._hidden:
            return TextStep("", self.stopped)
        return self._show(self._detokenizer.push((token_id,)))

    def finish(self) -> TextStep:
        """End the text: what was held back, and whether a stop string is complete."""
        step = self._show(self._detokenizer.finish())
        held = self._stop.flush()
        self._shown.append(held)
        return TextStep(step.text + held, step.stopped)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    @property
    def text(self) -> str:
        """All text shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def _show(self, text: str) -> TextStep:
        step = self._stop.push(text, may_stop=self._may_stop)
        self._shown.append(step.text)
        self.stopped = step.stopped
        return step
