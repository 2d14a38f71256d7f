import json
from pathlib import Path

import pytest

from sim.api import cost_model
from sim.model.config import ChainConfig
from sim.model.huggingface import MODEL_TYPES
from sim.scenario import ScenarioError, load_scenario, load_text
from sim.scenario.parallel import Fsdp
from sim.scenario.setup import Batch, Checkpoint, Host, Optimizer, Precision
from tests.unit.scenario_texts import VALID, changed, only, problems

SCENARIOS = Path(__file__).parents[2] / "scenarios"


# What a scenario gives


def test_a_rate_of_ones_own_for_matrix_products_reaches_the_prices():
    assert only().gemm_efficiency is None
    own = only(VALID + "gemm_efficiency: 0.62\n")
    assert own.gemm_efficiency == 0.62
    assert cost_model(own).profile.figures["gemm.efficiency"] == 0.62
    assert only(VALID + "attention_kernel: triton\n").attention_kernel == "triton"
    (problem,) = problems(VALID + "gemm_efficiency: 620\n")
    assert problem[:2] == (8, "gemm_efficiency")
    assert "a share above 0 and at most 1" in problem[2]


def test_a_scenario_gives_one_complete_setup_per_strategy():
    scenario = load_text(VALID, "mine.yaml")
    assert [setup.name for setup in scenario.strategies] == ["none", "full"]
    none, full = scenario.strategies
    assert none.batch == Batch(micro_batch=1, seq_len=512, accumulation=1)
    assert none.precision == Precision(parameters="fp32", compute="bf16", reduce="fp32", autocast=False)
    assert none.optimizer == Optimizer(name="adamw", variant="fused", clip_norm=1.0, zero_grad="end")
    assert none.fsdp == Fsdp(degree=8)
    assert none.host == Host(framework="eager", sync=("loss",))
    assert (none.torch, none.allocator, none.profile, none.checkpoint) == ("2.14", "", None, None)
    assert none.mesh.dimensions == (("fsdp", 8),)
    assert (none.model.layers, none.model.implementation) == (4, "torchtitan")
    assert full.checkpoint == Checkpoint()
    assert (full.model, full.cluster, full.mesh, full.fsdp) == (none.model, none.cluster, none.mesh, none.fsdp)
    assert scenario.warnings == ()
    hash(none)


def test_without_strategies_there_is_one_called_default():
    assert [setup.name for setup in load_text(VALID.partition("strategies")[0]).strategies] == ["default"]


def test_a_strategy_changes_what_it_names_and_null_switches_off():
    text = VALID.partition("strategies")[0] + (
        "checkpoint: {every: 2, save: [attention]}\n"
        "strategies:\n"
        "  same: {}\n"
        "  more: {checkpoint: {every: 1}, batch: {accumulation: 4}, optimizer: {clip_norm: null}}\n"
        "  none: {checkpoint: null, optimizer: null, allocator: 'expandable_segments:True', host: {sync: [clip, loss]}}\n"
    )
    same, more, none = load_text(text).strategies
    assert same.checkpoint == Checkpoint(every=2, save=("attention",))
    assert more.checkpoint == Checkpoint(every=1, save=("attention",))
    assert (more.batch.accumulation, more.optimizer) == (4, Optimizer(clip_norm=None))
    assert (none.checkpoint, none.optimizer) == (None, None)
    assert (none.allocator, none.host.sync) == ("expandable_segments:True", ("clip", "loss"))


def test_one_gpu_needs_no_parallel_section_and_autocasts_to_the_compute_dtype():
    setup = only("model: {preset: gpt-tiny}\ncluster: {gpu: a100}\nbatch: {micro_batch: 1, seq_len: 512}\n")
    assert (setup.cluster.gpus, setup.mesh.dimensions, setup.fsdp) == (1, (), None)
    assert setup.precision.autocast is True
    assert only(VALID).precision.autocast is False


def test_replicas_are_the_outer_dimension():
    setup = only(VALID, ["parallel.fsdp.degree=4", "parallel.fsdp.replicas=2"])
    assert setup.mesh.dimensions == (("replicate", 2), ("fsdp", 4))


@pytest.mark.parametrize("value", ["torchtitan", "true", "false", "4"])
def test_resharding_takes_a_name_a_truth_or_a_number(value):
    setup = only(VALID, [f"parallel.fsdp.reshard_after_forward={value}"])
    assert setup.fsdp.reshard_after_forward == {"torchtitan": "torchtitan", "true": True, "false": False, "4": 4}[value]


def test_memory_and_network_of_the_cluster_can_be_given():
    setup = only(
        VALID, ["cluster.usable_memory=64 GiB", "cluster.network=200 Gb/s", "cluster.communicator_memory=1 GB"]
    )
    assert setup.cluster.usable_memory_bytes == 64 * 2**30
    assert setup.cluster.network_bytes_per_s == 25 * 10**9
    assert setup.cluster.communicator_bytes == 10**9
    assert setup.cluster.source("usable_memory_bytes").label == "given"
    assert setup.cluster.source("context_bytes").label == "assumed"


def test_overrides_are_read_as_yaml_and_the_last_wins():
    overrides = ["batch.seq_len=256", "batch.seq_len=128", "strategies.none.checkpoint={every: 2}", "model.norm=manual"]
    setup = only(VALID, [*overrides, "checkpoint.save=[attention]"])
    assert (setup.batch.seq_len, setup.model.norm) == (128, "manual")
    assert setup.checkpoint == Checkpoint(every=2, save=("attention",))


def test_entries_of_a_chain_may_be_repeated():
    scenario = load_text(
        "model: {chain: {layers: 5, entry: 1 MiB, activation: [1 MiB x 3, 2 MiB, 3 MiB x 1], forward: 1 us,"
        " backward: [2 us x 5]}}\n"
    )
    chain = scenario.strategies[0].model
    assert isinstance(chain, ChainConfig)
    assert chain.activation_bytes == (1 << 20, 1 << 20, 1 << 20, 2 << 20, 3 << 20)
    assert chain.backward_ns == (2000,) * 5


def test_a_chain_needs_nothing_but_itself():
    text = (
        "model: {chain: {layers: 3, entry: 16 MiB, activation: [1 MiB, 2 MiB, 3 MiB], forward: 20 us, backward: 40 us,"
        " exposed_communication: 10 ms, shares_entry: true}}"
    )
    assert only(text).model == ChainConfig(
        name="chain",
        entry_bytes=(2**24,) * 3,
        activation_bytes=(2**20, 2**21, 3 * 2**20),
        forward_ns=(20_000,) * 3,
        backward_ns=(40_000,) * 3,
        recompute_ns=(20_000,) * 3,
        weight_gradient_ns=(20_000,) * 3,
        exposed_communication_ns=10_000_000,
        recompute_communication_ns=0,
        shares_entry=True,
    )
    assert only(text).cluster.gpus == 1


def test_a_file_extends_another_beside_it(tmp_path):
    (tmp_path / "base.yaml").write_text(VALID)
    (tmp_path / "middle.yaml").write_text("extends: base.yaml\nbatch: {seq_len: 256}\n")
    (tmp_path / "mine.yaml").write_text("extends: middle.yaml\nbatch: {micro_batch: 3}\nstrategies: {full: null}\n")
    scenario = load_scenario(tmp_path / "mine.yaml")
    assert (scenario.name, scenario.path) == ("mine", tmp_path / "mine.yaml")
    assert scenario.strategies[0].batch == Batch(micro_batch=3, seq_len=256)
    assert [(setup.name, setup.checkpoint) for setup in scenario.strategies] == [("none", None), ("full", None)]


def test_a_problem_in_an_extended_file_is_blamed_on_that_file(tmp_path):
    (tmp_path / "base.yaml").write_text(VALID.replace("512", "8k"))
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nbatch: {micro_batch: 0}\n")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(tmp_path / "mine.yaml")
    assert [(Path(problem.file).name, problem.line, problem.path) for problem in caught.value.problems] == [
        ("base.yaml", 3, "batch.seq_len"),
        ("mine.yaml", 2, "batch.micro_batch"),
    ]


def test_a_hugging_face_config_is_read_beside_the_scenario(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    (tmp_path / "mine.yaml").write_text(VALID.replace("preset: llama-tiny", "config: tiny.json"))
    model = load_scenario(tmp_path / "mine.yaml").strategies[0].model
    assert (model.name, model.layers, model.kv_heads) == ("tiny", 4, 2)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("none.json", "none.json: no such file or directory"),
        ("~nobody/none.json", "~nobody/none.json: no such file or directory"),
        ('"\\0"', "\0: not a JSON file: embedded null byte"),
    ],
)
def test_a_hugging_face_config_that_cannot_be_read_is_told_why(config, text):
    assert changed("preset: llama-tiny", f"config: {config}") == [(1, "model.config", text)]


def test_a_hugging_face_model_that_is_not_known_names_those_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    (tmp_path / "mine.yaml").write_text(VALID.replace("preset: llama-tiny", "config: config.json"))
    with pytest.raises(ScenarioError) as caught:
        load_scenario(tmp_path / "mine.yaml")
    (problem,) = caught.value.problems
    message = f"config.json: model_type lama is not known; one of {', '.join(MODEL_TYPES)}"
    assert (problem.line, problem.path, problem.text) == (1, "model.config", message)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_of_the_repository_is_valid_without_warnings(path):
    scenario = load_scenario(path)
    assert scenario.strategies and scenario.warnings == ()


def test_the_published_run_is_torchtitan_of_december_2024_on_128_gpus():
    (setup,) = load_scenario(SCENARIOS / "llama3_8b_128gpu.yaml").strategies
    assert (setup.cluster.gpus, setup.cluster.gpu.name, setup.fsdp.degree) == (128, "h100-96gb-hbm2e", 128)
    assert setup.optimizer == Optimizer(variant="foreach", zero_grad="start")
    assert (setup.model.norm, setup.batch.micro_batch) == ("manual", 2)
    assert setup.checkpoint.save == ("attention", "every_second_matmul")


# What a wrong one is told
