"""The bucket lab: which gradients to reduce together, found by calculation or by measuring.

Here: plans (``plan``), the exact optimum under a cost model (``optimal``), what a collective costs
(``collective_cost``) and when gradients come (``backward_profile``), ``bucket_cap_mb="auto"`` (``autotune``). Not
here: the command ``minddp tune``, cutting buckets by size (``buckets.py``), anything that a plain step runs, networks
that are not at hand (``benchmarks/topologies.py``).
"""

from .collective_cost import Cost, LinearCost, TableCost, fit_cost, fit_linear
from .optimal import bucket_spans, capped_buckets, optimal_plan, plan_finish
from .plan import BucketPlan, ParameterInfo

__all__ = [
    "BucketPlan",
    "Cost",
    "LinearCost",
    "ParameterInfo",
    "TableCost",
    "bucket_spans",
    "capped_buckets",
    "fit_cost",
    "fit_linear",
    "optimal_plan",
    "plan_finish",
]
