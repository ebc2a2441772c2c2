"""The OpenAI-compatible HTTP server: it knows requests, answers and, of all else, only the router."""
