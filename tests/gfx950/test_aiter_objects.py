"""AITER's own machine code, executed and compared with float64: the emulator on code that it was not written for."""

from dataclasses import replace

import pytest
import torch

from reference import relative_error

from ..aiter_wheel import skip_without_wheel
from . import aiter_objects as aiter
from .state import OutOfBounds

# P is rounded to fp8 in the a8w8 kernels, to bf16 in the others.
TOLERANCE = {"fp8": 4e-2, "bf16": 3e-3}


@pytest.fixture(autouse=True)
def _wheel():
    skip_without_wheel()


# With one split the fp8 kernel writes its output as bf16, which no arm uses.
@pytest.mark.parametrize(
    "form, lengths, splits", [("fp8", [300, 77], 2), ("bf16", [100, 70], 2), ("bf16", [100, 70], 1)]
)
def test_split_kernels(form, lengths, splits):
    problem = aiter.Problem.random(lengths, form, form)
    result = aiter.run_split(aiter.SPLIT[form], problem, splits)
    for sequence in range(len(lengths)):
        expected, expected_lse = problem.attention(sequence)
        rows = slice(sequence * splits, (sequence + 1) * splits)
        lse = result.lse[rows].double()
        total = torch.logsumexp(lse, dim=0)
        combined = (result.partial[rows].double() * (lse - total).exp()[:, :, None]).sum(dim=0)
        assert relative_error(combined, expected) < TOLERANCE[form]
        assert (total - expected_lse).abs().max() < 2e-6
    assert not result.run.findings


def run_units(forms, units, lengths, **options):
    """Runs a persistent kernel on hand-built items and checks each of them; returns the worst relative error."""
    problem = aiter.Problem.random(lengths, *forms)
    rows = 1 + max(row for items in units for *_, row in items)
    result = aiter.run_persistent(aiter.PERSISTENT[forms], problem, *aiter.work_tables(problem, units), rows, **options)
    worst = 0.0
    for sequence, start, end, row in (item for items in units for item in items):
        expected, lse = problem.attention(sequence, start, end)
        worst = max(worst, relative_error(result.output[sequence] if row < 0 else result.partial[row], expected))
        if row >= 0 and worst < 0.1:
            assert (result.lse[row] - lse).abs().max() < 2e-6
    return worst, result


@pytest.mark.parametrize(
    "forms, scale", [(("fp8", "fp8"), "q_scale"), (("fp8", "fp8"), "kv_scale"), (("bf16", "fp8"), "kv_scale")]
)
def test_a_null_scale_faults(forms, scale):
    """What the other runs leave out is never read: bf16 Q and bf16 caches have no scales here."""
    problem = replace(aiter.Problem.random([16], *forms), **{scale: None})
    with pytest.raises(OutOfBounds, match="address 0x0 is in no buffer"):
        aiter.run_persistent(aiter.PERSISTENT[forms], problem, *aiter.work_tables(problem, [[(0, 0, 16, 0)]]), 1)


@pytest.mark.parametrize("forms", aiter.PERSISTENT)
def test_persistent_kernels(forms):
    """A split sequence, a whole one that shares a unit with it, and a unit without work."""
    half, length, other = (150, 300, 77) if forms[0] == "fp8" else (40, 90, 37)
    units = [[(0, 0, half, 0), (1, 0, other, -1)], [(0, half, length, 1)], []]
    worst, result = run_units(forms, units, [length, other])
    assert worst < TOLERANCE[forms[0]]
    assert result.output[0].isnan().all() and not result.output[1].isnan().any()


def test_late_loads_show_the_wait_that_a16w16_misses():
    """The indices of an item's tokens 48 to 63 are used without a wait; with all loads landing late, that shows."""
    for tokens, missed in ((48, False), (60, True)):
        worst, result = run_units(("bf16", "bf16"), [[(0, 0, tokens, 0)]], [tokens], late_loads="late memory")
        assert "read before wait" in {finding.kind for finding in result.run.findings}
        assert (worst > 0.1) == missed  # up to 48 tokens what is read too early is masked
    worst, result = run_units(("bf16", "fp8"), [[(0, 0, 60, 0)]], [60], late_loads="late memory")
    assert worst < TOLERANCE["bf16"] and "read before wait" not in {f.kind for f in result.run.findings}


def test_a16w8_reads_lds_without_a_wait():
    """It leaves 14 MFMAs or more between such a read and its use; with LDS landing late too, no item is right."""
    worst, result = run_units(("bf16", "fp8"), [[(0, 0, 16, 0)]], [16], late_loads="late")
    early = [finding for finding in result.run.findings if finding.kind == "read before wait"]
    assert worst > 0.1
    assert early and all("mfma" in finding.instruction and "ds_read" in finding.detail for finding in early)


@pytest.mark.parametrize("quantum, right", [(37, True), (50, False)])
def test_a8w8_waves_must_stay_nearly_level(quantum, right):
    worst, _ = run_units(("fp8", "fp8"), [[(0, 0, 128, 0)]], [128], quantum=quantum)
    assert (worst < TOLERANCE["fp8"]) == right


def test_even_tiles_are_right_in_the_wheels_a8w8():
    """The runner's, one version newer, was seen to prefetch into its output staging there."""
    worst, _ = run_units(("fp8", "fp8"), [[(0, 0, 256, 0), (1, 0, 256, -1)]], [256, 256], late_loads="late memory")
    assert worst < TOLERANCE["fp8"]
