"""The worker process: one model, its device, and one blocking loop."""
