"""Engines: what runs a model inside a worker process.  They know token ids, never text or routing."""
