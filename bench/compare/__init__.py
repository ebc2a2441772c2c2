"""tokenflow beside what people use today, on recorded routes: ``python -m bench.compare``.

docs/benchmarks.md says what is measured, and has the figures.

Every system runs in a process of its own, in its own Python environment, and is told over its standard
input what to do; :mod:`bench.compare.serve` is that side of it.  What is imported there (``serve``, ``load``,
``traces``, ``work`` and a system's own module) needs the standard library and that system only.
"""
