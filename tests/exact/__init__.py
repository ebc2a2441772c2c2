"""Routed output against the naive reference, over the whole matrix.  Long: ``make exact`` runs it."""
