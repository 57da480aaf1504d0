"""The reducer's Python half: what is decided between iterations.

Here: which buckets, what a sum is divided by, and what all ranks must have in common before they start. May import
from ``config``, ``wire``, ``ranks`` and ``guards``. Not here: anything that knows ``DistributedDataParallel``.
"""
