"""Which gradients to reduce together: bucket plans, found by measuring, and the optimum under a cost model.

Here: plans (``plan``), ``bucket_cap_mb="auto"`` (``autotune``), and the exact optimum by calculation (``optimal``),
which no training step runs. Not here: the command ``minddp tune``; cutting buckets by size (``buckets.py``); what a
measured step and a link cost, and the optimum for them (``benchmarks/optimum``).
"""

from .optimal import Cost, LinearCost, bucket_spans, optimal_plan, plan_finish
from .plan import BucketPlan, ParameterInfo

__all__ = [
    "BucketPlan",
    "Cost",
    "LinearCost",
    "ParameterInfo",
    "bucket_spans",
    "optimal_plan",
    "plan_finish",
]
