"""How good are fixed caps and greedy merging, beside the optimum? 3,000 random backward passes.

    python benchmarks/planner_instances.py [--instances 3000] [--seed 0]

Each instance draws gradients' sizes and ready times and a link's latency and bandwidth. The script
first checks the planner (against brute force where an instance is small, its O(n) program against the
O(n^2) one elsewhere; it exits with 1 on any difference) and then prints how much later than the
optimum other rules finish.

Compared: torch's default caps (1 MiB first, then 25 MiB), the best of eight uniform caps, one bucket,
a bucket a gradient, and the greedy merging of MG-WFBP (Shi, Chu, Li: "MG-WFBP: Efficient Data
Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019).
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable

from optimum import capped

from minddp.planner import LinearCost, optimal_plan, plan_finish

MIB = 1 << 20
CAPS = [MIB // 4, MIB // 2, MIB, 2 * MIB, 5 * MIB, 10 * MIB, 25 * MIB, 50 * MIB]

Buckets = list[list[int]]
Instance = tuple[list[float], list[int], LinearCost]


def draw_instance(rng: random.Random) -> Instance:
    """Up to 400 gradients of 0.1 MB to 1 GB together, over links of 10 us to 1 ms and 0.1 to 10 GB/s."""
    n = rng.randint(2, 10) if rng.random() < 0.2 else rng.randint(11, 400)
    spread = rng.uniform(0.0, 2.5)
    weights = [rng.lognormvariate(0, spread) for _ in range(n)]
    total = 10 ** rng.uniform(5, 9)
    nbytes = [max(4, int(total * w / sum(weights))) for w in weights]
    cost = LinearCost(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-10, -8))
    backward = cost(int(total)) * 10 ** rng.uniform(-1, 1)
    steps = [rng.expovariate(1) * w ** rng.choice([0.0, 0.5, 1.0]) for w in weights]
    ready = [backward * s / sum(steps) for s in itertools.accumulate(steps)]
    return ready, nbytes, cost


def merged_greedily(ready: list[float], nbytes: list[int], cost: LinearCost) -> Buckets:
    """MG-WFBP: a gradient joins the bucket before it if it comes within one latency of that one's start."""
    buckets, done = [[0]], 0.0
    for position in range(1, len(ready)):
        start = max(done, ready[buckets[-1][-1]])
        if ready[position] < start + cost.latency_seconds:
            buckets[-1].append(position)
        else:
            done = start + cost(sum(nbytes[p] for p in buckets[-1]))
            buckets.append([position])
    return buckets


def best_uniform(ready: list[float], nbytes: list[int], cost: LinearCost) -> Buckets:
    return min(
        (capped(nbytes, [cap]) for cap in CAPS),
        key=lambda buckets: plan_finish(buckets, ready, nbytes, cost),
    )


RULES: dict[str, Callable[[list[float], list[int], LinearCost], Buckets]] = {
    "torch's caps, 1 and 25 MiB": lambda ready, nbytes, cost: capped(nbytes, [MIB, 25 * MIB]),
    "best of eight uniform caps": best_uniform,
    "MG-WFBP's greedy": merged_greedily,
    "one bucket": lambda ready, nbytes, cost: [list(range(len(nbytes)))],
    "a bucket a gradient": lambda ready, nbytes, cost: [[p] for p in range(len(nbytes))],
}


def partitions(n: int) -> list[Buckets]:
    """Every way to cut 0..n-1 into contiguous buckets."""
    plans = []
    for size in range(n):
        for cuts in itertools.combinations(range(1, n), size):
            edges = [0, *cuts, n]
            plans.append([list(range(a, b)) for a, b in itertools.pairwise(edges)])
    return plans


def verify(instance: Instance, finish: float) -> str:
    """Compares ``finish`` with brute force or with the program for any cost; which of them it was."""
    ready, nbytes, cost = instance
    if len(ready) <= 10:
        how = "brute force"
        truth = min(plan_finish(plan, ready, nbytes, cost) for plan in partitions(len(ready)))
    else:
        how = "O(n^2) program"
        truth = optimal_plan(ready, nbytes, cost.__call__).finish_seconds  # the same line, not known as one
    if abs(finish - truth) > 1e-9 * truth:
        sys.exit(f"optimal_plan gives {finish} where the {how} gives {truth}: {instance}")
    return how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    checked: dict[str, int] = {}
    excess: dict[str, list[float]] = {rule: [] for rule in RULES}
    for _ in range(options.instances):
        instance = draw_instance(rng)
        optimum = optimal_plan(*instance).finish_seconds
        how = verify(instance, optimum)
        checked[how] = checked.get(how, 0) + 1
        for rule, buckets in RULES.items():
            finish = plan_finish(buckets(*instance), instance[0], instance[1], instance[2])
            excess[rule].append(100 * (finish / optimum - 1))
    print(f"{options.instances} instances, seed {options.seed}; equal to: {checked}\n")
    print(f"{'later than the optimum, %':28}{'mean':>8}{'median':>8}{'p95':>8}{'worst':>8}")
    for rule, values in excess.items():
        values.sort()
        p95 = values[int(0.95 * (len(values) - 1))]
        print(f"{rule:28}{statistics.mean(values):8.1f}{statistics.median(values):8.1f}{p95:8.1f}{values[-1]:8.1f}")


if __name__ == "__main__":
    main()
