"""How a response looks on a terminal: text marked by the model that wrote it, and a line of figures."""

from __future__ import annotations

from collections.abc import Sequence

from tokenflow.types import Completion, StreamEvent

_COLORS = (36, 33, 35, 32, 34, 31)
_MARKS = ("", "«", "‹", "⟦", "⟪", "{")
_CLOSING = ("", "»", "›", "⟧", "⟫", "}")


class Painter:
    """Marks text by model: colours, or brackets around all but the first model where there are none."""

    def __init__(self, models: Sequence[str], color: bool) -> None:
        self._models = list(models)
        self._color = color
        self._current: str | None = None

    def paint(self, event: StreamEvent) -> str:
        """The event's text with marks where the model changes."""
        parts = []
        for token in event.tokens:
            if token.text and token.model != self._current:
                parts += [self.end(), self._open(token.model)]
                self._current = token.model
            parts.append(token.text)
        rest = event.text[sum(len(token.text) for token in event.tokens) :]
        return "".join(parts) + rest

    def end(self) -> str:
        """What closes the current mark."""
        if self._current is None:
            return ""
        style = self._style(self._current)
        self._current = None
        return "\x1b[0m" if self._color else _CLOSING[style]

    def legend(self) -> str:
        """One line that says which mark is which model."""
        if self._color:
            return "  ".join(f"{self._open(name)}{name}\x1b[0m" for name in self._models)
        return "  ".join(f"{self._open(name)}{name}{_CLOSING[self._style(name)]}" for name in self._models)

    def _open(self, model: str) -> str:
        style = self._style(model)
        return f"\x1b[{_COLORS[style]}m" if self._color else _MARKS[style]

    def _style(self, model: str) -> int:
        return self._models.index(model) % len(_COLORS)


def share_line(completion: Completion) -> str:
    """Tokens, share per model, hand-offs and speed in one line."""
    usage, timing = completion.usage, completion.timing
    total = usage.completion_tokens
    shares = ", ".join(f"{name} {count / total:.1%}" for name, count in usage.by_model.items())
    rate = total / timing.latency_s if timing.latency_s else 0.0
    return (
        f"{'simulated: ' if completion.simulated else ''}{_count(total, 'token')}: {shares}; "
        f"{_count(usage.handoffs, 'hand-off')}, {_count(usage.dropped, 'token')} dropped; "
        f"first token after {timing.ttft_s:.3f} s, {rate:.0f} tokens/s"
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
