"""The verbs that ask the cost model single questions."""

import pytest
from typer.testing import CliRunner

from sim.cli import app

RUNNER = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["profiles"], "h100-sxm"),
        (["profiles", "a100-sxm-80", "--only", "gemm"], "gemm.efficiency"),
        (["cost", "gemm", "8192", "4096", "14336", "--gpu", "h100-sxm"], "tensor cores"),
        (["cost", "attention", "1", "32", "8", "8192", "128", "--backward"], "attention.flash2.d128.efficiency"),
        (["cost", "memory", "elementwise", "192 MiB"], "bandwidth_efficiency"),
        (["cost", "collective", "all_gather", "416 MiB", "--ranks", "16"], "latency"),
        (["cost", "copy", "64 MiB", "--to-host"], "device_to_host"),
    ],
)
def test_single_questions_about_cost_are_answered(arguments, text):
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert text in done.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["profiles", "h100-smx"], "did you mean h100-sxm"),
        (["cost", "gemm", "8", "8", "8", "--gpu", "h10"], "no such GPU"),
        (["cost", "gemm", "0", "8", "8"], "Invalid value"),
        (["cost", "memory", "elementwise", "192"], "a size with a unit is expected"),
        (["cost", "memory", "foo", "1 GiB"], "one of copy"),
        (["cost", "collective", "gather", "1 GiB"], "did you mean all_gather"),
    ],
)
def test_a_wrong_question_about_cost_is_told_what_is_allowed(arguments, text):
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 2
    assert text in done.output + done.stderr
