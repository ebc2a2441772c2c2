"""tokenflow: serve token-level LLM routing fast, and make it easy to program."""
