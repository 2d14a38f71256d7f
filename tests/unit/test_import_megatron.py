"""Megatron's arguments become the scenario that they mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.interop import Entry, ImportProblems, Options, export_megatron
from sim.interop.table import load_table
from sim.model.config import Fp8, ModelConfig
from sim.scenario.setup import Setup
from tests.unit.imports import A100, BASE, GPT3, GPT22B, imported, megatron


def setup_of(folder: Path, *arguments: str, options: Options = A100) -> Setup:
    return megatron(folder, *arguments, options=options).scenario.strategies[0]


def problems_of(folder: Path, *arguments: str) -> str:
    with pytest.raises(ImportProblems) as raised:
        megatron(folder, *arguments)
    return str(raised.value)


def quoted(arguments: str) -> str:
    """Brackets of lists are bash's own unless they are quoted."""
    return " ".join(f"'{word}'" if "(" in word else word for word in arguments.split())


def names(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def test_gpt3_is_what_its_script_says(tmp_path: Path) -> None:
    found = imported(tmp_path, "megatron", "gpt3.sh", GPT3, A100)
    setup = found.scenario.strategies[0]
    model = setup.model
    assert (model.name, model.implementation, model.layers, model.hidden, model.heads) == (
        "gpt-3-175b", "megatron", 96, 12288, 96,
    )  # fmt: skip
    assert (model.ffn_hidden, model.kv_heads, model.dropout, model.tied_embeddings) == (49152, 96, 0.1, True)
    assert model.vocab == 51200  # 50,257 padded to a multiple of 128 x 8
    assert (setup.cluster.nodes, setup.cluster.gpus_per_node) == (16, 8)
    assert (setup.batch.micro_batch, setup.batch.seq_len, setup.batch.accumulation) == (1, 2048, 16 * 8 * 12 // 2)
    assert (setup.tensor.degree, setup.tensor.sequence_parallel) == (8, True)
    assert setup.pipeline is not None and (setup.pipeline.degree, setup.pipeline.schedule) == (8, "1f1b")
    assert setup.data is not None and (setup.data.degree, setup.data.distributed_optimizer) == (2, True)
    assert (setup.precision.parameters, setup.precision.compute, setup.precision.reduce) == ("fp16", "fp16", "fp16")
    assert setup.optimizer is not None and setup.optimizer.clip_norm == 1.0
    assert setup.checkpoint is None
    assert found.account.is_whole


def test_the_account_knows_lines(tmp_path: Path) -> None:
    account = imported(tmp_path, "megatron", "gpt3.sh", GPT3, A100).account
    assert Entry("--num-layers", 14, "model.layers: 96") in account.used
    assert Entry("--lr", 24, "") in account.ignored
    assert Entry("model.dropout", None, "0.1: --hidden-dropout 0.1 by default") in account.assumed


def test_a_variable_of_the_script_can_be_given(tmp_path: Path) -> None:
    options = replace(A100, variables={"NUM_NODES": "32"})
    setup = imported(tmp_path, "megatron", "gpt3.sh", GPT3, options).scenario.strategies[0]
    assert setup.cluster.nodes == 32
    assert setup.data is not None and setup.data.degree == 4


def test_korthikantis_22b_recomputes_core_attention(tmp_path: Path) -> None:
    """Table 5 of arXiv 2205.05198: 8 GPUs, micro-batch 4, sequence parallelism, selective recomputation."""
    setup = imported(tmp_path, "megatron", "22b.sh", GPT22B, A100).scenario.strategies[0]
    assert (setup.model.name, setup.batch.micro_batch, setup.batch.accumulation) == ("gpt-22b", 4, 1)
    assert setup.checkpoint is not None
    assert (setup.checkpoint.inside, setup.checkpoint.reentrant) == (("core_attention",), True)
    assert setup.model.attention == "unfused"
    assert setup.precision.reduce == "fp32"


def test_defaults_are_megatrons(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    assert (setup.model.ffn_hidden, setup.model.dropout, setup.model.attention) == (4096, 0.1, "sdpa")
    assert (setup.batch.accumulation, setup.tensor.degree, setup.pipeline) == (1, 1, None)
    assert setup.data is not None
    assert (setup.data.degree, setup.data.overlap, setup.data.gradient_accumulation_fusion) == (8, False, True)


@pytest.mark.parametrize(
    "arguments, path, value",
    [
        ("--ffn-hidden-size 2816", "model.ffn_hidden", 2816),
        ("--kv-channels 128", "model.head_dim", 128),
        ("--untie-embeddings-and-output-weights", "model.tied_embeddings", False),
        ("--hidden-dropout 0 --attention-dropout 0.0", "model.dropout", 0.0),
        ("--no-bias-gelu-fusion", "model.bias_gelu_fusion", False),
        ("--no-bias-dropout-fusion", "model.bias_dropout_fusion", False),
        ("--no-persist-layer-norm", "model.persistent_norm", False),
        ("--attention-backend=unfused", "model.attention", "unfused"),
        ("--transformer-impl local", "model.attention", "unfused"),
        ("--transformer-impl local --use-flash-attn", "model.attention", "sdpa"),
        ("--global-batch-size 64", "batch.accumulation", 4),
        ("--micro-batch-size 4", "batch.micro_batch", 4),
        ("--tensor-model-parallel-size 4 --sequence-parallel", "tensor.sequence_parallel", True),
        ("--sequence-parallel", "tensor.sequence_parallel", False),
        ("--use-distributed-optimizer", "data.distributed_optimizer", True),
        ("--overlap-grad-reduce", "data.overlap", True),
        ("--use-precision-aware-optimizer --use-distributed-optimizer", "data.moments", "fp32"),
        ("--use-distributed-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "data.moments", "fp32"),
        ("--no-gradient-accumulation-fusion", "data.gradient_accumulation_fusion", False),
        ("--context-parallel-size 2", "context.degree", 2),
        ("--context-parallel-size 2", "data_parallel", 4),
        ("--context-parallel-size 2 --cp-comm-type all_gather", "context.kind", "all-gather"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "context.kind", "ulysses"),
        ("--grad-reduce-in-bf16", "precision.reduce", "bf16"),
        ("--clip-grad 0", "optimizer.clip_norm", None),
        ("--pipeline-model-parallel-size 4", "pipeline.placement", (6, 6, 6, 6)),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3", "pipeline.placement", (3, 7, 7, 7)),
        (
            "--num-layers 22 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            "pipeline.placement",
            (5, 6, 6, 5),
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*11|t*13,L'", "pipeline.placement", (11, 13)),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|(t*7|)*2t*7L' --global-batch-size 32",
            "pipeline.placement",
            (3, 7, 7, 7),
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 64",
            "pipeline.chunks",
            3,
        ),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 64",
            "pipeline.schedule",
            "interleaved",
        ),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "checkpoint.segment", 2),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 5", "checkpoint.first", 5),
        ("--recompute-granularity selective --recompute-modules mlp", "checkpoint.inside", ("mlp",)),
        ("--recompute-granularity selective --recompute-modules layernorm", "checkpoint.discard", ("norm",)),
        ("--checkpoint-activations", "checkpoint.reentrant", True),
        ("--checkpoint-activations --checkpoint-num-layers 4", "checkpoint.segment", 4),
        ("--cpu-offloading-num-layers 3", "offload.layers", (0, 1, 2)),
        (
            "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights",
            "fsdp.degree",
            8,
        ),
    ],
)  # fmt: skip
def test_an_argument_becomes_a_field(arguments: str, path: str, value: object, tmp_path: Path) -> None:
    found: object = setup_of(tmp_path, arguments)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--num-attention-heads 15", ("line 1", "--num-attention-heads", "must divide hidden (1024)")),
        ("--num-layers many", ("--num-layers", "many: a whole number is expected")),
        ("--global-batch-size 30", ("--global-batch-size", "30 is no multiple of micro-batch 2 x 8 replicas")),
        ("--tensor-model-parallel-size 3", ("tensor 3 x pipeline 1 does not divide 8 GPUs",)),
        ("--pipeline-model-parallel-size 8 --num-layers 20", ("20 layers do not come in 8 equal stages",)),
        ("--recompute-granularity full", ("--recompute-method", "uniform or block")),
        ("--recompute-granularity everything", ("everything: full or selective is expected",)),
        ("--fp16", ("both --bf16 and --fp16 are given",)),
        ("--seq-length 2048", ("--seq-length", "the model has 1024 learned positions")),
        ("--seq-length", ("--seq-length", "a whole number is expected")),
    ],
)
def test_wrong_arguments_are_told_with_line_and_name(arguments: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    said = problems_of(tmp_path, arguments)
    assert all(words in said for words in expected), said
    assert said.endswith("Nothing was imported.")


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    text = "python pretrain_gpt.py --num-layers x --nnodes $NODES --hidden-size 64\n"
    with pytest.raises(ImportProblems) as raised:
        imported(tmp_path, "megatron", "run.sh", text, Options())
    said = str(raised.value)
    for words in (
        "--gpu ", "--num-layers", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--vocab-size",
        "$NODES is only known when the script runs", "without --bf16 or --fp16",
    ):  # fmt: skip
        assert words in said, said


@pytest.mark.parametrize(
    "arguments, name",
    [
        ("--tp-comm-overlap", "--tp-comm-overlap"),
        ("--fp32-residual-connection", "--fp32-residual-connection"),
        ("--optimizer muon", "--optimizer muon"),
        ("--attention-dropout 0.2", "--attention-dropout 0.2"),
        ("--position-embedding-type rope", "--position-embedding-type rope"),
        ("--normalization RMSNorm", "--normalization RMSNorm"),
        ("--squared-relu", "--squared-relu"),
        ("--quick-geglu", "--quick-geglu"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local"),
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "--cp-comm-type a2a+p2p"),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp8", "--exp-avg-dtype fp8"),
        ("--recompute-granularity selective --recompute-modules core_attn moe_act", "--recompute-modules core_attn moe_act"),
    ],
)  # fmt: skip
def test_what_has_an_effect_and_no_field_is_told(arguments: str, name: str, tmp_path: Path) -> None:
    account = megatron(tmp_path, arguments).account
    assert name in names(account.not_expressible)
    assert not account.is_whole


def test_squared_relu_beside_rotary_positions_is_nemotrons_layer(tmp_path: Path) -> None:
    drawn = megatron(
        tmp_path,
        "--squared-relu --position-embedding-type rope --normalization LayerNorm --disable-bias-linear "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --untie-embeddings-and-output-weights",
    )
    assert drawn.account.is_whole
    model = drawn.scenario.strategies[0].model
    assert isinstance(model, ModelConfig)
    assert (model.family, model.activation, model.norm) == ("llama", "squared_relu", "layer_norm")
    assert model.ffn_hidden == 4 * model.hidden


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--fp8-format hybrid", Fp8(recipe="delayed")),
        ("--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16", Fp8(recipe="tensorwise", first=1, last=1)),
        ("--fp8-format hybrid --use-distributed-optimizer --fp8-param-gather", Fp8(recipe="delayed", stored=True)),
        ("--fp8-format e4m3 --fp8-recipe blockwise", Fp8(recipe="blockwise")),
        ("--fp8-recipe tensorwise", None),
    ],
)  # fmt: skip
def test_8_bit_products_come_and_go(arguments: str, expected: Fp8 | None, tmp_path: Path) -> None:
    h100 = replace(A100, gpu="h100-sxm-80gb")
    found = megatron(tmp_path, arguments, options=h100)
    setup = found.scenario.strategies[0]
    assert isinstance(setup.model, ModelConfig) and setup.model.fp8 == expected
    assert found.account.is_whole
    text, lost = export_megatron(setup, "x.yaml")
    assert lost == []
    assert imported(tmp_path, "megatron", "again.sh", text, h100).scenario.strategies[0].model == setup.model


@pytest.mark.parametrize("arguments", ["--cuda-graph-impl none", "--context-parallel-size 1", "--zero-stage 0"])
def test_what_says_the_default_is_no_effect(arguments: str, tmp_path: Path) -> None:
    assert megatron(tmp_path, arguments).account.is_whole


def test_unknown_arguments_are_told_with_the_nearest(tmp_path: Path) -> None:
    account = megatron(tmp_path, "--overlap-grad-reduces --my-own-thing 1 2").account
    assert account.unknown == [
        Entry("--my-own-thing", 1, "Megatron-LM has no such field"),
        Entry("--overlap-grad-reduces", 1, "did you mean --overlap-grad-reduce?"),
    ]


MIXTRAL = (
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --swiglu --group-query-attention "
    "--num-query-groups 8 --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-permute-fusion --ffn-hidden-size 3584 --make-vocab-size-divisible-by 1 "
    "--moe-router-dtype fp32"
)


def test_experts_are_megatrons(tmp_path: Path) -> None:
    found = megatron(tmp_path, MIXTRAL, "--expert-model-parallel-size 4 --use-distributed-optimizer")
    setup = found.scenario.strategies[0]
    experts = setup.model.experts
    assert (setup.model.family, setup.model.kv_heads, setup.expert.degree) == ("llama", 8, 4)
    assert (experts.count, experts.top_k, experts.ffn_hidden, experts.auxiliary_loss) == (8, 2, 3584, True)
    assert (experts.scores_first, experts.router_dtype, experts.permute_fusion) == (False, "fp32", True)
    assert found.account.is_whole, found.account


def test_deepseeks_layers_are_megatrons(tmp_path: Path) -> None:
    """Latent attention, groups of experts, a bias on the choice, the first layers dense: DeepSeek-V3's arguments, small."""
    arguments = (
        "--multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --moe-layer-freq ([0]*3+[1]*21) --moe-ffn-hidden-size 256 --num-experts 64 "
        "--moe-shared-expert-intermediate-size 256 --moe-router-score-function sigmoid --moe-router-num-groups 8 "
        "--moe-router-group-topk 4 --moe-router-topk 8 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type none"
    )
    setup = setup_of(tmp_path, MIXTRAL.replace("--group-query-attention --num-query-groups 8 ", ""), quoted(arguments))
    experts, latent = setup.model.experts, setup.model.latent
    assert (experts.dense_layers, experts.ffn_hidden, experts.shared_ffn_hidden, experts.scaling) == (3, 256, 256, 2.5)
    assert (experts.scores, experts.groups, experts.groups_top, experts.selection_bias) == ("sigmoid", 8, 4, True)
    assert experts.auxiliary_loss is False
    assert (latent.kv_rank, latent.q_rank, latent.rope_head_dim, latent.value_head_dim) == (512, 1536, 64, 128)


def test_a_null_tokenizer_has_one_entry_more(tmp_path: Path) -> None:
    arguments = BASE.replace("--padded-vocab-size 51200", "--tokenizer-type NullTokenizer --vocab-size 131072")
    text = f"torchrun --nproc_per_node 1 pretrain_gpt.py {arguments}"
    assert imported(tmp_path, "megatron", "run.sh", text, A100).scenario.strategies[0].model.vocab == 131200


def test_slurm_says_the_nodes(tmp_path: Path) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=2 \n#SBATCH --gpus-per-node 4\nsrun python pretrain_gpt.py {BASE}\n"
    cluster = imported(tmp_path, "megatron", "run.sh", text, A100).scenario.strategies[0].cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 4)


def test_slurm_says_gpus_by_resources_rather_than_tasks(tmp_path: Path) -> None:
    lines = "#SBATCH --nodes=8   # as needed\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n"
    text = f"#!/bin/bash\n{lines}srun python pretrain_gpt.py {BASE}\n"
    cluster = imported(tmp_path, "megatron", "run.sh", text, A100).scenario.strategies[0].cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (8, 8)


def test_options_lie_over_the_file(tmp_path: Path) -> None:
    options = Options(gpu="h100", nodes=2, changes=("model.vocab=64000", "batch.seq_len=512"))
    setup = setup_of(tmp_path, options=options)
    assert (setup.cluster.gpus, setup.model.vocab, setup.batch.seq_len) == (16, 64000, 512)


YAML = """
MODEL_ARGS:
  --num-layers: 24
  --hidden-size: 1024
  --num-attention-heads: 16
  --seq-length: 1024
  --max-position-embeddings: 1024
  --micro-batch-size: 2
  --bf16: true
  --fp16: false
  --use-distributed-optimizer: true
  --padded-vocab-size: 51200
"""
NEMO = """
trainer: {devices: 8, num_nodes: 1, precision: bf16, gradient_clip_val: 0.5}
exp_manager: {create_wandb_logger: false}
model:
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
  encoder_seq_length: 1024
  max_position_embeddings: 1024
  micro_batch_size: 2
  share_embeddings_and_output_weights: false
  bias_gelu_fusion: false
  activations_checkpoint_granularity: full
  activations_checkpoint_method: uniform
  activations_checkpoint_num_layers: 1
  padded_vocab_size: 51200
"""


def test_files_of_settings_say_the_same(tmp_path: Path) -> None:
    options = replace(A100, gpus_per_node=8)
    from_yaml = imported(tmp_path, "megatron", "args.yaml", YAML, options).scenario.strategies[0]
    assert from_yaml == setup_of(tmp_path, "--use-distributed-optimizer", options=options)
    from_file = imported(tmp_path, "megatron", "args.txt", BASE.replace(" --", "\n--"), options).scenario.strategies[0]
    assert from_file == setup_of(tmp_path, options=options)


def test_nemos_names_are_known(tmp_path: Path) -> None:
    setup = imported(tmp_path, "megatron", "nemo.yaml", NEMO, A100).scenario.strategies[0]
    assert setup == setup_of(
        tmp_path,
        "--untie-embeddings-and-output-weights --no-bias-gelu-fusion --clip-grad 0.5",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    )


def test_the_table_covers_the_arguments_of_megatron() -> None:
    table = load_table("megatron")
    assert len(table.fields) > 400
    assert all(field.says for field in table.fields.values() if field.kind == "effect")
