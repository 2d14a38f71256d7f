import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.scenario import Scenario, ScenarioError, load_text

EXAMPLES = int(os.environ.get("SIM_EXAMPLES", "150"))
TEXTS = [path.read_text() for path in sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))]
PATHS = """model model.preset model.layers model.heads model.config model.chain model.chain.layers model.dropout cluster
cluster.gpu cluster.nodes cluster.usable_memory batch batch.seq_len batch.target_len model.implementation model.head
model.classes model.decoder_layers model.image_size model.patch_size model.attention checkpoint.inside
parallel parallel.fsdp parallel.fsdp.degree
parallel.fsdp.reshard_after_forward parallel.pipeline parallel.pipeline.degree parallel.pipeline.schedule
parallel.ddp parallel.ddp.degree parallel.ddp.bucket_cap parallel.fsdp1 parallel.fsdp1.degree parallel.fsdp1.strategy
parallel.zero parallel.zero.degree parallel.zero.stage parallel.zero.prefetch_bucket_size
parallel.zero.offload_optimizer parallel.zero.offload_param parallel.zero.pipeline_read cluster.nvme cluster.nvme_read
parallel.pipeline.virtual parallel.pipeline.placement parallel.pipeline.overlap_p2p parallel.pipeline.scatter_gather
batch.accumulation checkpoint.keep_micro_batches model.persistent_norm parallel.tensor parallel.tensor.degree
parallel.tensor.async_all_reduce
precision precision.compute optimizer optimizer.clip_norm checkpoint checkpoint.save
offload offload.what offload.layers offload.streams offload.above strategies.mixed.offload.look_ahead cluster.host_memory
checkpoint.every checkpoint.segment checkpoint.first allocator host host.sync profile strategies strategies.full
strategies.x.checkpoint.every torch description nonsense extends""".split()  # noqa: SIM905 (reads better)

SYNTAX = [
    "{",
    "}",
    "[",
    "]",
    ": ",
    "\n",
    "- ",
    "&a ",
    "*a",
    "!!int ",
    "!",
    "|",
    ">",
    "'",
    '"',
    "#",
    "%",
    "<<: ",
    "~",
    "\t",
]
fragments = st.text(max_size=3) | st.sampled_from([*SYNTAX, "---\n", "? "])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["8 GiB", "1 us"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["fsdp", "every", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def is_scenario_or_error(text: str, overrides: list[str]) -> None:
    try:
        assert isinstance(load_text(text, "mutated.yaml", overrides), Scenario)
    except ScenarioError as error:
        assert error.problems
        assert str(error).endswith("Nothing was run.")


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), text=st.sampled_from(TEXTS))
def test_a_mutated_text_is_a_scenario_or_a_scenario_error(data, text):
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.sampled_from([0, 0, 1, 2, 10]))
        text = text[:start] + data.draw(fragments) + text[end:]
    is_scenario_or_error(text, [])


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), text=st.sampled_from(TEXTS))
def test_a_mutated_value_is_a_scenario_or_a_scenario_error(data, text):
    paths = data.draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3))
    is_scenario_or_error(text, [f"{path}={data.draw(values)!r}" for path in paths])


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=st.text(), override=st.text())
def test_any_text_is_a_scenario_or_a_scenario_error(text, override):
    is_scenario_or_error(text, [override])
