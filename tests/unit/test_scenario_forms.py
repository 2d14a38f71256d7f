"""Forms of checkpointing and what goes around training, said in a scenario: what is accepted, what is a problem."""

from __future__ import annotations

import pytest

from sim.scenario import ScenarioError, load_text
from sim.scenario.setup import Checkpoint, Region, Setup

TEXT = """
model: {preset: PRESET, layers: 8}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 256}
precision: {parameters: bf16, compute: bf16}
"""
PIPELINE = TEXT.replace("gpus_per_node: 1}", "gpus_per_node: 2}\nparallel: {pipeline: {degree: 2}}").replace(
    "seq_len: 256", "seq_len: 256, accumulation: 4"
)
LLAMA, GPT = "llama-tiny, implementation: torchtitan", "gpt-tiny, implementation: nanogpt"


def setup_of(more: str, preset: str = LLAMA, text: str = TEXT) -> Setup:
    return load_text(f"{text.replace('PRESET', preset)}{more}\n", "forms.yaml").strategies[0]


def problem_of(more: str, preset: str = LLAMA, text: str = TEXT) -> tuple[str, str]:
    """Path and text of the only problem."""
    with pytest.raises(ScenarioError) as caught:
        setup_of(more, preset, text)
    (problem,) = caught.value.problems
    return problem.path, problem.text


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("{sequential: 4}", Checkpoint(sequential=4)),
        ("{nested: [2, 2]}", Checkpoint(nested=(2, 2))),
        ("{boundaries: [3, 5]}", Checkpoint(boundaries=(3, 5))),
        ("{reentrant: true, segment: 2}", Checkpoint(reentrant=True, segment=2)),
        ("{inside: attention}", Checkpoint(inside=("attention",))),
        ("{inside: [attention, mlp], every: 2}", Checkpoint(inside=("attention", "mlp"), every=2)),
        ("{discard: norm}", Checkpoint(discard=("norm",))),
        (
            "{layers: [full, none, {save: [attention]}, {inside: mlp, reentrant: true}]}",
            Checkpoint(
                layers=(Region(), None, Region(save=("attention",)), Region(inside=("mlp",), reentrant=True)) * 2
            ),
        ),
    ],
)
def test_a_form_is_read(written: str, read: Checkpoint) -> None:
    assert setup_of(f"checkpoint: {written}").checkpoint == read


@pytest.mark.parametrize(
    ("written", "path", "text"),
    [
        ("{nested: [2, 2], every: 2}", "every", "2: the regions are given by nested already"),
        ("{sequential: 2, boundaries: [4]}", "boundaries", "[4]: the regions are given by sequential already"),
        ("{nested: [3, 4]}", "nested", "[3, 4]: 12 innermost regions, but only 8 layers"),
        ("{nested: 2}", "nested", "2: a list of whole numbers from 1 to 10,000 is expected, e.g. [2, 2]"),
        ("{sequential: 9}", "sequential", "9: must be at most the number of layers (8)"),
        ("{boundaries: [3, 8]}", "boundaries", "[3, 8]: the last layer is 7"),
        ("{boundaries: [4, 3]}", "boundaries", "[4, 3]: layers in rising order are expected"),
        ("{layers: [full, none, none]}", "layers", "3 choices do not go evenly into 8 layers"),
        ("{layers: [full], save: [attention]}", "save", '["attention"]: with layers, each layer says this for itself'),
        ("{layers: [{insid: mlp}]}", "layers[0].insid", "(did you mean inside?)"),
        ("{layers: [{save: [aten.m]}]}", "layers[0].save[0]", "(did you mean aten.mm?)"),
        ("{inside: attn}", "inside", "attn: one of attention, mlp, norm (did you mean attention?)"),
        ("{inside: mlp, segment: 2}", "segment", "2: regions inside a layer (inside) do not go with it"),
        ("{reentrant: true, save: [attention]}", "save", "keeps no outputs (use_reentrant=True takes no context_fn)"),
    ],
)
def test_a_wrong_form_is_a_problem(written: str, path: str, text: str) -> None:
    found, message = problem_of(f"checkpoint: {written}")
    assert found == f"checkpoint.{path}"
    assert message.endswith(text)


def test_a_block_of_one_function_has_no_parts() -> None:
    assert problem_of("checkpoint: {inside: mlp}", GPT)[1].endswith("nothing inside can be wrapped")


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("optimizer: {in_backward: true}", "optimizer.clip_norm"),
        ("optimizer: {momentum: 0.9}", "optimizer.momentum"),
        ("mode: evaluate", "mode"),
    ],
)
def test_other_settings_that_cannot_be(written: str, path: str) -> None:
    assert problem_of(written)[0] == path


def test_master_weights_are_for_16_bit_parameters() -> None:
    text = TEXT.replace("{parameters: bf16", "{parameters: fp32")
    assert problem_of("optimizer: {master_weights: true}", text=text)[0] == "optimizer.master_weights"


def test_reentrant_regions_after_a_frozen_embedding_are_warned_of() -> None:
    text = TEXT.replace("PRESET", f'{LLAMA}, frozen: ["tok_embeddings.*"]')
    (warning,) = load_text(f"{text}checkpoint: {{reentrant: true}}\n", "forms.yaml").warnings
    assert "the layers would not be trained" in warning
    assert load_text(f"{text}checkpoint: {{}}\n", "forms.yaml").warnings == ()


def test_implementations_that_compute_their_own_loss_have_no_chunks() -> None:
    preset = "llama-tiny, implementation: transformers, loss_chunks: 4"
    assert problem_of("", preset)[0] == "model.loss_chunks"


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("checkpoint: {nested: [2, 2]}", "checkpoint.nested"),
        ("checkpoint: {layers: [full, none]}", "checkpoint.layers"),
        ("optimizer: {master_weights: true}", "optimizer.master_weights"),
        ("mode: no_grad", "mode"),
    ],
)
def test_what_a_pipeline_does_not_go_with(written: str, path: str) -> None:
    assert problem_of(written, text=PIPELINE)[0] == path
