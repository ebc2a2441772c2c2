"""Routing: signals and rules evaluated in a worker, in one batch after each step."""
