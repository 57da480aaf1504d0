"""Reductions other than the plain mean: sums, weighted means, other dtypes.

Here: the arguments ``reduction`` and ``reduce_dtype`` (``observer``), and the divisor of ``reduction="weighted"``
(``weights``). Not here: fewer bytes (``wire``), the collectives.
"""
