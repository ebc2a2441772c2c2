"""Actors: one per model, with a mailbox and three loops; they own the truth about every request."""
