"""Whether a run under an engine is what a run with torch's class by torchrun is."""

from __future__ import annotations

from typing import Any

from tests.lab.engines.engines import MINDDP, TORCH, Engine

# Of two ranks a sum is a sum; of four it depends on where in its bucket an element lies, and the classes' buckets
# differ. So it does when the rest is summed over fewer ranks, after a machine was lost.
TOLERANCE = 1e-5


def verdict(engine: Engine, report: dict[str, Any], whole: dict[str, Any]) -> str:
    """A line for the table.

    Raises:
        AssertionError: the class is not minddp's, the weights differ, or the run did not resume.
    """
    assert (whole["class"], report["class"]) == (TORCH, MINDDP), f"trained by {report['class']}"
    assert report["ranks"] == engine.ranks, f"ended with {report['ranks']} ranks"
    assert (report["began"] > 0) == engine.resumes, f"began with step {report['began']}"
    differences = [abs(ours - theirs) for ours, theirs in zip(report["weights"], whole["weights"], strict=True)]
    exact = engine.ranks == 2 and not engine.resumes
    assert max(differences) <= (0 if exact else TOLERANCE), f"weights differ by up to {max(differences):.1e}"
    text = "the same bits" if max(differences) == 0 else f"the same to {max(differences):.0e}"
    resumed = f", resumed at step {report['began']}" if engine.resumes else ""
    return text + resumed + (f', over "{report["backend"]}"' if report["backend"] != "gloo" else "")
