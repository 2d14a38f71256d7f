"""A scenario goes out as Megatron's arguments and comes back the same, or the difference is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.api import load
from sim.interop import export_megatron, scenario_text
from sim.interop.export_megatron import ExportProblems
from tests.unit.imports import A100, FOLDER, GPT22B, imported, megatron
from tests.unit.scenarios import ROOT, TINY, sim, write
from tests.unit.test_import_megatron import MIXTRAL

ROUND_TRIPS = [
    "",
    "--tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce",
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3 --grad-reduce-in-bf16",
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 64 --clip-grad 0",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 5 --no-bias-gelu-fusion",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --kv-channels 128",
    "--recompute-granularity selective --recompute-modules core_attn layernorm --transformer-impl local",
    "--cpu-offloading-num-layers 3 --ffn-hidden-size 2816 --untie-embeddings-and-output-weights",
    "--hidden-dropout 0 --attention-dropout 0 --no-bias-dropout-fusion --no-gradient-accumulation-fusion",
    "--context-parallel-size 2 --global-batch-size 16",
    "--context-parallel-size 4 --cp-comm-type all_gather",
    "--context-parallel-size 4 --cp-comm-type a2a",
    "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    MIXTRAL + " --expert-model-parallel-size 4",
]


@pytest.mark.parametrize("arguments", ROUND_TRIPS)
def test_what_was_imported_comes_back_the_same(arguments: str, tmp_path: Path) -> None:
    found = megatron(tmp_path, arguments)
    path = write(tmp_path, scenario_text(found, tmp_path), "run.yaml")
    setup = load(path).strategies[0]
    text, lost = export_megatron(setup, str(path))
    assert lost == []
    again = imported(tmp_path, "megatron", "again.sh", text, A100)
    assert again.scenario.strategies[0] == setup
    assert again.account.is_whole


def test_the_22b_model_comes_back_the_same(tmp_path: Path) -> None:
    setup = imported(tmp_path, "megatron", "22b.sh", GPT22B, A100).scenario.strategies[0]
    assert export_megatron(setup, "22b.yaml")[1] == []


def test_what_does_not_come_back_is_told(tmp_path: Path) -> None:
    setup = load(ROOT / "scenarios" / "megatron_recompute.yaml").strategies[2]
    lost = export_megatron(setup, "x.yaml")[1]
    assert 'checkpoint.discard: ["norm", "activation"], but ["norm"] comes back' in lost


def test_other_implementations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportProblems, match="only models of implementation megatron") as caught:
        export_megatron(load(write(tmp_path, TINY)).strategies[0], "mine.yaml")
    assert str(caught.value).endswith("Nothing was exported.")


def test_the_command_is_printed_and_losses_change_the_exit_code(tmp_path: Path) -> None:
    out = tmp_path / "gpt3.yaml"
    sim("import", "megatron", FOLDER / "gpt3_175b.sh", "--gpu", "a100", "--out", out)
    result = sim("export", "megatron", out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py")
    lossy = sim("export", "megatron", out, "--set", "optimizer.zero_grad=end")
    assert lossy.exit_code == 4
    assert "optimizer.zero_grad: end, but start comes back" in lossy.stderr
    assert sim("export", "deepspeed", out).exit_code == 2
    assert "did you mean default?" in sim("export", "megatron", out, "--only", "defaults").stderr
