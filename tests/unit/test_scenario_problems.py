"""Wrong scenarios: every problem at once, with line, path, and what is allowed."""

import json
from pathlib import Path

import pytest

from sim.hardware.catalogue import gpu_names
from sim.scenario import ScenarioError, json_schema, load_scenario, load_text
from tests.unit.scenario_texts import VALID, changed, only, problems

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def test_all_problems_are_shown_together_as_text():
    text = (
        "model:     {preset: llama-tiny, implementation: torchtian}\n"
        "cluster:   {gpu: h100-sxm-80gb, gpus_per_node: 8}\n"
        "batch:     {micro_batch: 1, seq_len: 8k}\n"
        "parallel:  {fsdp: {degree: 8, replicas: 2}}\n"
    )
    with pytest.raises(ScenarioError) as caught:
        load_text(text, "scenarios/mine.yaml")
    names = "torchtitan, transformers, nanogpt, megatron"
    assert str(caught.value) == (
        "scenarios/mine.yaml\n"
        f"  line 1  model.implementation  torchtian: one of {names} (did you mean torchtitan?)\n"
        "  line 3  batch.seq_len         8k: a number of tokens is expected, e.g. 8192\n"
        "  line 4  parallel              replicate 2 x fsdp 8 = 16 ranks, but the cluster has 8 GPUs\n"
        "3 problems. Nothing was run."
    )


def test_one_problem_is_singular():
    with pytest.raises(ScenarioError, match=r"\n1 problem\. Nothing was run\."):
        load_text(VALID.replace("512", "8k"))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("batch: ", "bacth: ", (3, "bacth", "(did you mean batch?)")),
        ("seq_len", "seqlen", (3, "batch.seqlen", "one of micro_batch, seq_len, target_len, accumulation (did you")),
        ("{every: 1}", "{evry: 1}", (7, "strategies.full.checkpoint.evry", "(did you mean every?)")),
        ("full: {checkpoint", "full: {checkpoints", (7, "strategies.full.checkpoints", "(did you mean checkpoint?)")),
        (
            "full: {checkpoint: {every: 1}",
            "full: {torch: '2.9'",
            (7, "strategies.full.torch", "cannot be set per strat"),
        ),
    ],
)
def test_an_unknown_field_is_told_the_nearest_name(old, new, expected):
    line, path, text = expected
    found = [problem for problem in changed(old, new) if problem[1] == path]
    assert [problem[0] for problem in found] == [line]
    assert text in found[0][2]


CHECKPOINT = "strategies.full.checkpoint"
RESHARD = "parallel.fsdp.reshard_after_forward"


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "text"),
    [
        ("512", "8k", 3, "batch.seq_len", "8k: a number of tokens is expected, e.g. 8192"),
        ("512", "'512'", 3, "batch.seq_len", "512: a number of tokens is expected, e.g. 8192; in quotes it is text"),
        (
            "512",
            "5000000000",
            3,
            "batch.seq_len",
            "5000000000: a number of tokens of at most 1,000,000,000 is expected",
        ),
        ("512", "0", 3, "batch.seq_len", "0: a number of tokens of at least 1 is expected"),
        ("batch: 1", "batch: true", 3, "batch.micro_batch", "true: a number of sequences is expected, e.g. 1"),
        ("{every: 1}", "{every: 1.5}", 7, f"{CHECKPOINT}.every", "1.5: a whole number is expected, e.g. 1"),
        ("{every: 1}", "{early_stop: yes}", 7, f"{CHECKPOINT}.early_stop", "yes: true or false is expected"),
        ("{every: 1}", "3", 7, CHECKPOINT, "3: a section is expected, e.g. {name: value}"),
        ("{every: 1}", "{save: mm}", 7, f"{CHECKPOINT}.save", "mm: a list is expected, e.g. [...]"),
        ("llama-tiny", "7", 1, "model.preset", "7: text is expected"),
        (
            "{checkpoint: {every: 1}}",
            "3",
            7,
            "strategies.full",
            "3: the sections that it changes are expected, e.g. {checkpoint: {every: 2}}",
        ),
        (
            "degree: 8",
            "degree: 8, reshard_after_forward: 1",
            4,
            RESHARD,
            "1: torchtitan, true, false or a number of ranks above 1 is expected",
        ),
        (
            "degree: 8",
            "degree: 8, reshard_after_forward: 3",
            4,
            RESHARD,
            "3: must divide the degree (8) and be smaller; all ranks is true",
        ),
        (
            "degree: 8",
            "degree: 8, units: block",
            4,
            "parallel.fsdp.units",
            "block: one of blocks, torchtitan_2026 (did you mean blocks?)",
        ),
    ],
)
def test_a_wrong_type_is_told_what_is_expected(old, new, line, path, text):
    assert changed(old, new) == [(line, path, text)]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("cluster.usable_memory=80", "80: a size with a unit is expected, e.g. 80 GiB"),
        ("cluster.network=400", "400: a bandwidth with a unit is expected, e.g. 400 Gb/s"),
        ("precision.compute=fp33", "fp33: one of fp32, bf16, fp16 (did you mean fp32?)"),
        ("optimizer.clip_norm=-1", "-1: a number above 0 is expected"),
        ("optimizer.clip_norm=.nan", "NaN: a number above 0 is expected"),
        ("model.dropout=1", "1: a probability from 0 to below 1 is expected"),
        ("host.sync=[los]", "los: one of loss, clip (did you mean loss?)"),
        ("torch=2.10", '2.1: a version in quotes is expected, e.g. "2.14" (without quotes 2.10 is the number 2.1)'),
        ("torch=new", 'new: a version is expected, e.g. "2.14"'),
    ],
)
def test_values_need_their_units_and_names(override, text):
    path = override.partition("=")[0].replace("host.sync", "host.sync[0]")
    assert problems(VALID, [override]) == [(None, path, text)]


def test_a_duration_of_the_chain_needs_its_unit():
    text = "model:\n  chain: {layers: 2, entry: 1 MiB, activation: 1 MiB, forward: 20,\n    backward: [1 us, 2]}\n"
    expected = "a duration with a unit is expected, e.g. 12 us"
    assert problems(text) == [
        (2, "model.chain.forward", f"20: {expected}"),
        (3, "model.chain.backward", f'["1 us", 2]: in every entry of the list, {expected}'),
    ]


def test_a_chains_lists_have_one_entry_per_layer():
    text = (
        "model:\n  layers: 3\n  chain: {layers: 2, entry: [1 MiB], activation: 1 MiB, forward: 1 us, backward: 1 us}\n"
    )
    assert problems(text) == [
        (2, "model.layers", "does not apply to a chain"),
        (3, "model.chain.entry", "1 entries, but the chain has 2 layers"),
    ]


def test_a_duplicate_key_is_a_problem():
    text = VALID + "batch: {seq_len: 1}\n"
    assert problems(text) == [(8, "batch", "is given twice, first in line 3")]
    assert changed("seq_len: 512", "seq_len: 512,\n  seq_len: 1") == [
        (4, "batch.seq_len", "is given twice, first in line 3")
    ]


def test_heads_must_divide_hidden_and_kv_heads_heads():
    assert changed("llama-tiny", "llama-tiny, kv_heads: 3") == [(1, "model.kv_heads", "3: must divide heads (8)")]
    assert changed("llama-tiny", "llama-tiny,\n  heads: 6") == [
        (2, "model.heads", "6: must divide hidden (512), or give head_dim")
    ]


def test_the_ranks_must_be_the_gpus():
    assert changed("degree: 8", "degree: 4") == [(4, "parallel", "fsdp 4 = 4 ranks, but the cluster has 8 GPUs")]
    assert changed("gpus_per_node: 8", "nodes: 2") == [(4, "parallel", "fsdp 8 = 8 ranks, but the cluster has 16 GPUs")]
    advice = "nothing shares the work of 8 GPUs: add fsdp: {degree: 8}, or use one GPU"
    assert changed("{fsdp: {degree: 8}}", "{}") == [(4, "parallel", advice)]


def test_unknown_gpus_presets_and_code_are_told_the_nearest():
    ((line, path, text),) = changed("h100-sxm-80gb", "h100-sxm-80")
    assert (line, path) == (2, "cluster.gpu")
    assert text.startswith(f"h100-sxm-80: one of {len(gpu_names())} names such as h100-sxm-80gb")
    assert text.endswith("(did you mean h100-sxm-80gb?)")
    ((line, path, text),) = changed("llama-tiny", "lama-tiny")
    assert (line, path) == (1, "model.preset")
    assert text.endswith("(did you mean llama-tiny?)")
    message = "nanogpt: no such code for the llama family; one of torchtitan, transformers, megatron"
    assert changed("torchtitan", "nanogpt") == [(1, "model.implementation", message)]


def test_an_implementation_without_what_the_model_needs_is_told_what_that_is():
    message = "torchtitan: no such code for a window and squared_relu; one of megatron"
    asked = "preset: llama-tiny, window: 8, activation: squared_relu"
    assert changed("preset: llama-tiny", asked) == [(1, "model.implementation", message)]


def test_numbers_to_choose_from_are_listed_as_names_are():
    found = changed("full: {checkpoint", "zero: {parallel: {zero: {degree: 1, stage: 0}}}\n  full: {checkpoint")
    assert [text for _, path, text in found if path.endswith("zero.stage")] == ["0: one of 1, 2, 3"]


def test_exactly_one_source_of_a_model():
    message = "exactly one of preset, config and chain is expected, not "
    assert changed("preset: llama-tiny, ", "") == [(1, "model", message + "none")]
    assert changed("preset: llama-tiny", "preset: llama-tiny, config: a.json") == [
        (1, "model", message + "preset and config")
    ]


def test_positions_are_a_limit_when_learned_and_a_hint_when_rotary():
    gpt = VALID.replace("preset: llama-tiny, implementation: torchtitan", "preset: gpt-tiny").replace("512", "513")
    assert problems(gpt) == [(3, "batch.seq_len", "513: the model has 512 learned positions (model.max_positions)")]
    assert load_text(VALID.replace("512", "8193"), "mine.yaml").warnings == (
        "mine.yaml line 3: batch.seq_len 8193: the model was made for 8192 positions",
    )


def test_a_policy_about_mm_is_warned_of_biases():
    gpt = VALID.replace("preset: llama-tiny, implementation: torchtitan", "preset: gpt-tiny")
    warned = load_text(gpt.replace("{every: 1}", "{save: [aten.mm]}"), "mine.yaml").warnings
    assert warned == (
        "mine.yaml line 7: strategies.full.checkpoint.save[0] aten.mm: the linear layers have biases and run"
        " aten.addmm, which this does not save: use aten.addmm",
    )
    assert load_text(gpt.replace("{every: 1}", "{save: [aten.mm, aten.addmm.default]}")).warnings == ()
    assert load_text(VALID.replace("{every: 1}", "{save: [aten.mm]}")).warnings == ()


@pytest.mark.parametrize(
    "name", ["aten.addmm", "aten.bmm", "aten.native_dropout.default", "aten.embedding", "aten.cat"]
)
def test_an_operator_that_does_not_occur_is_warned_of(name):
    (warned,) = load_text(VALID.replace("{every: 1}", f"{{save: [{name}]}}"), "mine.yaml").warnings
    assert warned == (
        f"mine.yaml line 7: strategies.full.checkpoint.save[0] {name}: does not occur in the layers of this model:"
        " nothing is saved by it"
    )


def test_attention_that_is_not_fused_cannot_be_saved_by_its_name():
    text = VALID.replace("torchtitan}", "torchtitan, attention: math}").replace("{every: 1}", "{save: [attention]}")
    (warned,) = load_text(text).warnings
    assert warned.endswith("with attention: math no fused attention occurs: nothing is saved by it")


@pytest.mark.parametrize(
    ("checkpoint", "path", "text"),
    [
        ("{save: [atention]}", "save[0]", "(did you mean attention?)"),
        ("{save: [attention, aten.adm]}", "save[1]", "(did you mean aten.addmm?)"),
        ("{segment: 5}", "segment", "5: must be at most the number of layers to checkpoint (4)"),
        ("{segment: 2, first: 1}", "segment", "2: must be at most the number of layers to checkpoint (1)"),
        ("{every: 5}", "every", "5: must be at most the number of regions (4)"),
        ("{every: 3, segment: 2}", "every", "3: must be at most the number of regions (2)"),
        ("{every: 0}", "every", "0: a whole number of at least 1 is expected"),
        ("{first: 5}", "first", "5: must be at most the number of layers (4)"),
    ],
)
def test_regions_and_operators_must_exist(checkpoint, path, text):
    ((line, found, message),) = changed("{every: 1}", checkpoint)
    assert (line, found) == (7, f"strategies.full.checkpoint.{path}")
    assert message.endswith(text)


def test_nothing_casts_on_one_gpu_without_autocast():
    text = (
        "model: {preset: gpt-tiny}\ncluster: {gpu: a100}\nbatch: {micro_batch: 1, seq_len: 8}\n"
        "precision: {autocast: false}\n"
    )
    message = "false: on one GPU nothing else casts: parameters in fp32 and compute in bf16 need autocast: true"
    assert problems(text) == [(4, "precision.autocast", message)]
    fp32 = text.replace("autocast: false", "autocast: true, compute: fp32")
    assert problems(fp32) == [
        (4, "precision.autocast", "true: autocast computes in bf16 or fp16, but precision.compute is fp32")
    ]


def test_a_dtype_without_matrix_units_names_those_that_there_are():
    v100 = VALID.replace("h100-sxm-80gb", "v100")
    message = "NVIDIA V100 SXM2 32 GB has no bf16 matrix units: use fp16 or fp32"
    assert problems(v100) == [(None, "precision.compute", message)]
    assert problems(v100, ["precision.compute=bf16"]) == [(None, "precision.compute", "bf16: " + message)]
    for dtype in ("fp16", "fp32"):
        assert load_text(v100, overrides=[f"precision.compute={dtype}"]).warnings == ()


def test_missing_sections_are_named():
    assert problems("description: nothing\n") == [
        (None, "model", "is missing"),
        (None, "cluster", "is missing"),
        (None, "batch", "is missing"),
    ]
    assert changed(", seq_len: 512", "") == [(3, "batch.seq_len", "is missing")]
    assert changed("gpu: h100-sxm-80gb, ", "") == [(2, "cluster.gpu", "is missing")]


def test_strategies_need_at_least_one():
    expected = "at least one strategy is expected, e.g. {full: {checkpoint: {every: 1}}}"
    assert problems(VALID.partition("strategies")[0] + "strategies: {}\n") == [(5, "strategies", "{}: " + expected)]


def test_bad_syntax_is_told_with_its_line():
    ((line, path, text),) = problems("model: {preset: llama-tiny\nbatch: [\n")
    assert (line, path) == (2, "")
    assert text.startswith("not YAML: ")
    assert problems("model: 1\n\tbatch: 2\n")[0][0] == 2
    assert problems("a: *nothing\n")[0][0] == 1


def test_a_text_that_is_no_scenario_is_told_so():
    assert problems("") == [(None, "", "is empty: a scenario has at least a model")]
    assert problems("# nothing but a comment\n") == [(None, "", "is empty: a scenario has at least a model")]
    assert problems("- 1\n- 2\n") == [(1, "", "sections are expected, e.g. model: {preset: llama-3.1-8b}")]
    assert problems("a: &a [*a]\n") == [(1, "a[0]", "contains itself")]
    assert problems(VALID + "? [a]\n: 1\n") == [(8, "", "a name is expected before the colon")]
    assert problems(VALID + "host: !mine {sync: !yours []}\n") == [
        (8, "host", "the tag !mine means nothing here"),
        (8, "host.sync", "the tag !yours means nothing here"),
    ]
    assert problems(VALID + "profile: !mine l40s\n") == [(8, "profile", "the tag !mine means nothing here")]


def test_a_file_that_cannot_be_read_is_told_why(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, text in [
        ("none.yaml", "no such file or directory"),
        ("", "is a directory: a file is expected"),
        ("empty.yaml", "is empty: a scenario has at least a model"),
        ("binary.yaml", "is not a text file (UTF-8 is expected)"),
    ]:
        with pytest.raises(ScenarioError) as caught:
            load_scenario(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}\n  {text}\n1 problem. Nothing was run."


def test_extends_must_lead_somewhere_and_not_back(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n" + VALID)
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    (tmp_path / "c.yaml").write_text("extends: none.yaml\n" + VALID)
    (tmp_path / "d.yaml").write_text("extends: ~nobody/none.yaml\n" + VALID)
    (tmp_path / "e.yaml").write_text('extends: "\\0"\n' + VALID)
    for name, expected in [
        ("a.yaml", (1, "extends", "a.yaml: leads back to itself")),
        ("c.yaml", (1, "extends", "none.yaml: no such file or directory")),
        ("d.yaml", (1, "extends", "~nobody/none.yaml: no such file or directory")),
        ("e.yaml", (1, "extends", "\0: is no name of a file")),
    ]:
        with pytest.raises(ScenarioError) as caught:
            load_scenario(tmp_path / name)
        assert [(problem.line, problem.path, problem.text) for problem in caught.value.problems] == [expected]


def test_an_override_without_path_or_value_is_a_problem():
    expected = "path=value is expected, e.g. batch.seq_len=8192"
    for override in ["batch.seq_len", "=3", "batch..x=3", "extends=a.yaml"]:
        assert problems(VALID, [override]) == [(None, override, expected)]
    ((line, path, text),) = problems(VALID, ["checkpoint={every: 1"])
    assert (line, path, text.startswith("not YAML: ")) == (None, "checkpoint", True)


def test_the_json_schema_describes_every_field_and_requires_nothing_of_a_strategy():
    schema = json_schema()
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    definitions = schema["$defs"]
    assert definitions["BatchSection"]["required"] == ["micro_batch"]
    assert "required" not in definitions["PartialBatchSection"]
    for name, definition in definitions.items():
        for field, description in definition["properties"].items():
            assert "Strategy" in name or description.get("description") or "$ref" in description, (name, field)


def test_allocator_settings_are_those_of_the_named_torch():
    text = VALID + "allocator: expandable_segment:True,max_split_size_mb:1\n"
    messages = [(path, message) for _, path, message in problems(text)]
    assert [path for path, _ in messages] == ["allocator", "allocator"]
    assert "PyTorch 2.14 has no such option (did you mean expandable_segments?)" in messages[0][1]
    assert "max_split_size_mb" in messages[1][1]
    assert only(VALID + "allocator: expandable_segments:True\n").allocator == "expandable_segments:True"
