"""The optimum for what was measured: times of a step (``backward_profile``), what an all-reduce costs
(``collective_cost``), and the buckets that ``minddp.planner.optimal_plan`` gives for both, tried (``planned``)."""
