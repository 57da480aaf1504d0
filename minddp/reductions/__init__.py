"""Reductions other than the plain mean: sums, weighted means, other dtypes and factors.

Here: the arguments ``reduction``, ``reduce_dtype`` and ``predivide_factor`` (``observer``), and the divisor of
``reduction="weighted"`` (``weights``). Not here: fewer bytes (``wire``), the collectives.
"""
