"""An engine without weights that fails on demand, for tests of what runs around engines."""
