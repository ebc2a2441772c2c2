"""SGLang itself, on a CPU.  ``make test-sglang`` runs this in a virtual environment of its own."""
