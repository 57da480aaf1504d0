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


def measured(choice, *names):
    """A plan of 20 ms steps or longer, each choice 10 ms faster than the one before it."""
    trials = [
        {"name": name, "buckets": 2, "steps": 4, "step_seconds": 0.2 - 0.01 * i, "quartiles": [0.19 - 0.01 * i, 0.3]}
        for i, name in enumerate(names)
    ]
    notes = {"choice": choice, "trials": trials, "model": "Net", "ranks": 8, "backend": "gloo"}
    return BucketPlan([[0]], notes=notes).for_parameters(["weight"], [(1024, 256)], [torch.float32])


def test_the_table_of_a_plan_marks_what_was_kept_with_both_quartiles():
    lines = str(measured("uniform 2 MiB", "default", "uniform 1 MiB", "uniform 2 MiB")).splitlines()
    assert [line for line in lines if line.endswith("<- kept")] == [lines[3]]
    assert "180.0    [170.0, 300.0]" in lines[3]
    said = "tried 3, kept uniform 2 MiB: 200.0 [190.0, 300.0] -> 180.0 [170.0, 300.0] ms a step"
    assert lines[4] == said
    kept = measured("default", "default", "uniform 1 MiB").summary()
    assert kept == "tried 2, kept the default: 200.0 [190.0, 300.0] ms a step; uniform 1 MiB: 190.0 [180.0, 300.0]"
    assert repr(measured("default", "default")) == "BucketPlan(1 bucket, 1 gradient, 1.0 MiB)"


def test_the_picture_has_a_row_for_each_choice_from_zero_and_nothing_overlaps(tmp_path):
    from minddp.planner.picture import draw

    plan = measured("uniform 2 MiB", "default", *(f"uniform {cap} MiB" for cap in (0.5, 1, 2, 5, 10, 25, 50)))
    plan.draw(tmp_path / "plan.png", link="1 Gbit/s")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    title = plan._title("1 Gbit/s")
    assert title == "Net, 1.0 MiB, 8 ranks, gloo, 1 Gbit/s: uniform 2 MiB is kept"
    figure = draw(plan.notes["trials"], "uniform 2 MiB", title)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    rows = axes.get_yticklabels()
    assert [row.get_text() for row in rows][::7] == ["default, 2 buckets", "uniform 50 MiB, 2 buckets"]
    assert rows[3].get_text() == "uniform 2 MiB, 2 buckets, kept"
    assert axes.get_xlim()[0] == 0 and axes.yaxis_inverted()  # the first on top
    ticks = [tick.label1 for tick in axes.xaxis.get_major_ticks() if 0 <= tick.get_loc() <= axes.get_xlim()[1]]
    boxes = [text.get_window_extent() for text in (*rows, *ticks, axes.xaxis.label, figure._suptitle)]
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box.overlaps(other)]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_plan_that_nothing_was_measured_for_is_not_drawn(tmp_path):
    with pytest.raises(ValueError, match="nothing was measured"):
        BucketPlan([[0]]).draw(tmp_path / "plan.png")
