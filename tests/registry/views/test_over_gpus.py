"""Efficiency over GPUs as it is drawn: measurements whole, predictions dashed and called so."""

from __future__ import annotations

import re

from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.views.looks import palette
from kernelmark.registry.views.over_gpus import scalings
from kernelmark.registry.views.report import render

from ...steps import COMPUTE, journal, stepped, truth


def drawn(*records):
    run = journal(*records)
    found = rows(run)
    return scalings(run, found, palette(found))


def test_predictions_are_dashed_and_called_predictions():
    """Of four GPUs from two, within 3 % of what was measured there, and of eight, which were not."""
    found = drawn(stepped(1, COMPUTE * 1.005), stepped(2, truth(2) * 0.995), stepped(4, truth(4) * 1.005))
    (one,) = found
    assert (one.title, one.kind, one.predicted) == ("train S4096-1-single, ddp", "weak", True)
    measured, predicted = re.findall(
        r'<path d="M([^"]+)" style="fill:none;stroke:var\(--s\d\)([^"]*)"', one.drawing
    )
    assert "dasharray" not in measured[1]
    assert "dasharray" in predicted[1]
    assert [len(re.findall(r"-?[\d.]+", x)) for x, _ in (measured, predicted)] == [2 * 2, 2 * 3], "coordinates"
    assert one.drawing.count(">prediction</text>") == 1
    tips = re.findall(r"<title>([^<]+)</title>", one.drawing)
    assert [x.startswith("PREDICTION for ") for x in tips] == [False, False, True, True]
    four, eight = (x for x in one.lines if x.startswith("PREDICTION"))
    off = re.search(r"([+-−]?[\d.]+) % of the step that was measured", four)
    assert off is not None
    assert abs(float(off[1].replace("−", "-"))) < 3
    assert eight.startswith("PREDICTION for 8 GPUs from 2, ours: ")
    assert "measured" not in eight


def test_without_all_reduces_or_one_gpu_nothing_is_predicted_or_drawn():
    (one,) = drawn(stepped(1, 30.0), stepped(2, 33.0, sent=()))
    assert not one.predicted
    assert "dashed" not in one.drawing
    assert drawn(stepped(2, 33.0)) == ()


def test_the_report_says_what_is_a_prediction():
    page = render([journal(stepped(1, 30.0), stepped(2, 33.0))])
    assert "Dashed lines are predictions" in page
    assert 'id="run1-scaling"' in page
    alone = render([journal(stepped(1, 30.0))])
    assert "run1-scaling" not in alone
