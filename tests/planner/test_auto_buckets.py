"""``bucket_cap_mb="auto"`` and pinned plans on real ranks, in a real DistributedDataParallel."""

import os

import pytest
import torch

import minddp
from minddp.planner import BucketPlan
from minddp.planner.autotune import TunerSettings
from tests.forked import run_module
from tests.ranks_pool import run_ranks

SETTINGS = TunerSettings(warmup_iterations=2, measured_iterations=2, laps=2, caps_mb=(0.01, 0.1, 1))
STEPS = 60


class Mixed(torch.nn.Module):
    """Layers of two dtypes, so that buckets are of two kinds."""

    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(6))
        self.last = torch.nn.Linear(width, 3).double()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x.double())


def train(ddp, rank, steps, set_to_none=True):
    """The parameters after ``steps`` steps, with forwards in between that are not synchronized."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(5, 64, generator=generator)
        optimizer.zero_grad(set_to_none)
        if step % 7 == rank:  # other counts of forwards on other ranks
            with torch.no_grad():
                ddp(x)
        if step % 3 == 0:
            with ddp.no_sync():
                ddp(x).square().mean().backward()
        ddp(x).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().double() for p in ddp.parameters()])


def tune_and_pin(rank, world_size, folder):
    fixed = train(minddp.DistributedDataParallel(Mixed()), rank, STEPS)
    ddp = minddp.DistributedDataParallel(Mixed(), bucket_cap_mb="auto")
    ddp._minddp_observers.get("planner").tuner.settings = SETTINGS
    tuned = train(ddp, rank, STEPS)
    plan = minddp.bucket_plan(ddp)
    path = os.path.join(folder, f"plan{rank}.json")
    plan.save(path)
    pinned = minddp.DistributedDataParallel(Mixed(), bucket_plan=BucketPlan.load(path))
    pinned_from_start = pinned.reducer.buckets()
    again = train(pinned, rank, STEPS)
    with pytest.raises(ValueError, match="made for another model"):
        minddp.DistributedDataParallel(Mixed(width=32), bucket_plan=plan)
    views = minddp.DistributedDataParallel(Mixed(), bucket_cap_mb="auto", gradient_as_bucket_view=True)
    views._minddp_observers.get("planner").tuner.settings = SETTINGS
    with_views = train(views, rank, STEPS, set_to_none=False)
    return {
        "settled": ddp._minddp_observers.get("planner").tuner.settled
        and views._minddp_observers.get("planner").tuner.settled,
        "same": all(torch.equal(fixed, other) for other in (tuned, again, with_views)),
        "parameters": tuned,
        "buckets": [ddp.reducer.buckets(), pinned_from_start, pinned.reducer.buckets()],
        "dtypes": [{str(ddp._minddp_wrapped.reduced[i].dtype) for i in bucket} for bucket in ddp.reducer.buckets()],
        "notes": plan.notes,
    }


def test_tuning_changes_no_bit_on_two_ranks_and_its_plan_can_be_pinned(tmp_path):
    results = run_ranks(tune_and_pin, 2, str(tmp_path))
    first, second = results
    assert all(result["settled"] and result["same"] for result in results)
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["buckets"] == second["buckets"]
    assert first["buckets"][0] == first["buckets"][1] == first["buckets"][2]
    assert all(len(kinds) == 1 for kinds in first["dtypes"])
    assert first["notes"] == second["notes"]
    assert [trial["name"] for trial in first["notes"]["trials"]][:2] == ["default", "uniform 0.01 MiB"]
    assert all(trial["step_seconds"] > 0 for trial in first["notes"]["trials"])


def join_while_tuning(rank, world_size):
    ddp = minddp.DistributedDataParallel(Mixed(), bucket_cap_mb="auto")
    ddp._minddp_observers.get("planner").tuner.settings = SETTINGS
    train(ddp, rank, 5)
    buckets = ddp.reducer.buckets()
    with ddp.join():
        for _ in range(10 + 20 * rank):
            ddp(torch.ones(5, 64)).square().mean().backward()
    return ddp._minddp_observers.get("planner").tuner.settled, ddp.reducer.buckets() == buckets, buckets


def test_tuning_rests_while_ranks_may_run_out_of_data():
    results = run_ranks(join_while_tuning, 2)
    assert results[0] == results[1]
    assert results[0][:2] == (False, True)


def leaves_the_planner_out(rank, world_size):
    with pytest.raises(TypeError, match='bucket_cap_mb="auto" needs a companion'):
        minddp.DistributedDataParallel(Mixed(), bucket_cap_mb="auto")


def test_auto_without_the_planner_is_refused():
    run_ranks(leaves_the_planner_out, 1, env={"MINDDP_WITHOUT": "planner"})


@pytest.mark.all
def test_the_command_writes_a_plan_that_the_model_takes(tmp_path, monkeypatch):
    models = (
        "import torch\ndef make():\n    return torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])\n"
    )
    (tmp_path / "models_to_tune.py").write_text(models)
    arguments = ["--model", "models_to_tune:make", "--input", "4x32", "--ranks", "2", "--out", "plan.json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    done = run_module("minddp", "tune", *arguments, "--laps", "1", "--iterations", "1")
    assert done.returncode == 0, done.stderr
    assert "<- kept" in done.stdout
    assert "written to plan.json" in done.stdout
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    facts = zip(*[(name, p.shape, p.dtype) for name, p in model.named_parameters()])
    buckets = BucketPlan.load(tmp_path / "plan.json").parameter_buckets(*map(list, facts))
    assert sorted(index for bucket in buckets for index in bucket) == list(range(8))
