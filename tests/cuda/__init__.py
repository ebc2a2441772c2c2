"""Engines on a GPU; ``python -m bench.gpu_check`` runs this.  ``--device cpu`` tries it without one."""
