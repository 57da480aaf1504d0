"""What `minddp tune` makes of its arguments; the tuning itself is in tests/planner."""

import sys
import types

import pytest
import torch

from minddp.cli.tune import TuneError, load_workload, main
from minddp.planner import BucketPlan

CPU = torch.device("cpu")


@pytest.fixture
def models():
    """A module to name in --model; its attributes are the factories."""
    module = types.ModuleType("tune_models")
    sys.modules["tune_models"] = module
    yield module
    del sys.modules["tune_models"]


def test_a_module_alone_is_fed_the_inputs_and_its_outputs_summed(models):
    class Net(torch.nn.Linear):
        def forward(self, x, y):
            return {"a": super().forward(x), "b": (super().forward(y), None)}

    models.make = lambda: Net(3, 2)
    module, loss = load_workload("tune_models:make", ["4x3", "1x3"], CPU)
    value = loss(module)
    assert value.shape == ()
    value.backward()
    assert module.bias.grad.tolist() == [5.0, 5.0]  # four rows and one


def test_a_module_with_its_loss_needs_no_inputs(models):
    models.make = lambda: (torch.nn.Linear(3, 2), lambda model: model(torch.ones(1, 3)).sum())
    module, loss = load_workload("tune_models:make", [], CPU)
    assert loss(module).requires_grad


@pytest.mark.parametrize(
    "spec, factory, inputs, complaint",
    [
        ("tune_models", None, [], "not of the form module:factory"),
        ("no_such_module:make", None, [], "No module named 'no_such_module'"),
        ("tune_models:other", None, [], "has no attribute 'other'"),
        ("tune_models:make", 3, [], "make is no function but int"),
        ("tune_models:make", lambda: 3, [], r"returned int: return a module, or \(module, loss\)"),
        ("tune_models:make", lambda: torch.nn.Linear(1, 1), [], "add --input, such as"),
        ("tune_models:make", lambda: torch.nn.Linear(1, 1), ["3,4"], "'3,4' is no shape"),
        ("tune_models:make", lambda: torch.nn.Linear(1, 1), ["0x4"], "'0x4' is no shape"),
    ],
)
def test_what_cannot_be_run_is_named(models, spec, factory, inputs, complaint):
    if factory is not None:
        models.make = factory
    with pytest.raises(TuneError, match=complaint):
        load_workload(spec, inputs, CPU)


def test_an_output_without_tensors_is_named(models):
    models.make = lambda: type("Net", (torch.nn.Linear,), {"forward": lambda self, x: "text"})(1, 1)
    module, loss = load_workload("tune_models:make", ["1x1"], CPU)
    with pytest.raises(TuneError, match="the model returned str"):
        loss(module)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--out", "plan.json"], "under torchrun, or give --ranks with at least 2"),
        (["--out", "plan.json", "--ranks", "1"], "--ranks with at least 2"),
        (["--out", "no/such/folder/plan.json", "--ranks", "2"], "is not there or not writable"),
    ],
)
def test_the_command_ends_with_one_line(models, monkeypatch, tmp_path, capsys, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    models.make = lambda: torch.nn.Linear(1, 1)
    assert main(["--model", "tune_models:make", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("minddp tune: ")
    assert complaint in line
    assert list(tmp_path.iterdir()) == []


def test_the_table_and_the_picture_of_a_plan_mark_what_was_kept(tmp_path):
    trials = [
        {"name": name, "buckets": 2, "steps": 4, "step_seconds": seconds, "predicted_step_seconds": 0.1}
        | {"quartiles": [seconds, seconds + 0.01]}
        for name, seconds in [("default", 0.2), ("planned 1", 0.15)]
    ]
    notes = {"choice": "planned 1", "trials": trials, "allreduce": "LinearCost(…)"}
    notes |= {"measured_step_seconds": 0.15, "default_step_seconds": 0.2}
    plan = BucketPlan([[0]], 0.1, notes=notes | {"nbytes": 4000})
    lines = str(plan).splitlines()
    assert [line for line in lines if line.endswith("<- kept")] == [lines[2]]
    assert "150.0    [150.0, 160.0]" in lines[2]
    assert lines[3].startswith("tried 2, kept planned 1: 200.0 -> 150.0 ms a step, quartiles [150.0, 160.0]; ")
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
