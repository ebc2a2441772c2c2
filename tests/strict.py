"""A pytest plugin for ``make test-debug``: garbage is collected whenever it can be.

What only a forgotten reference keeps alive (a task, a transport, a coroutine that nobody awaited) dies at
once then, and says so; with ``PYTHONASYNCIODEBUG=1`` it says where it was made.
"""

from __future__ import annotations

import gc

gc.set_threshold(1)
