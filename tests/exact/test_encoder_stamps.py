"""Stamped layers of encoders give the program that recording every layer gives."""

from __future__ import annotations

import pytest

from sim.model.calls import interpret
from sim.runtime.recorder import Recorder
from sim.runtime.train import TrainingRun, record_training
from sim.runtime.train_pipeline import record_pipeline
from tests.exact.test_stamps import assert_equal, setup_of

BERT = """
model: {preset: bert-base, layers: 7, hidden: 256, ffn_hidden: 512, heads: 4, vocab: 1024, CHANGES}
cluster: {gpu: h100, gpus_per_node: GPUS}
batch: {micro_batch: 2, seq_len: 128, accumulation: 2}
"""
CHANGES = {
    "sdpa": "dropout: 0.1",
    "eager": "attention: unfused",
    "no dropout": "dropout: 0.0, attention: unfused",
    "classification": "head: classification, classes: 3",
}
FORMS = {
    "none": "null",
    "full": "{every: 1}",
    "every 2": "{every: 2}",
    "segments of 2": "{segment: 2}",
    "sequential": "{sequential: 3}",
    "nested": "{nested: [2, 2]}",
    "reentrant": "{reentrant: true}",
    "attention": "{inside: attention}",
    "selective": "{save: [attention, aten.addmm]}",
}


def text(changes: str, gpus: int = 1) -> str:
    return BERT.replace("CHANGES", changes).replace("GPUS", str(gpus))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", CHANGES)
def test_bert_on_one_gpu(changes: str, form: str) -> None:
    setup = setup_of(f"{text(CHANGES[changes])}precision: {{parameters: bf16}}\ncheckpoint: {FORMS[form]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["fsdp", "fsdp1", "ddp"])
def test_bert_over_several_ranks(family: str, form: str) -> None:
    parallel = f"parallel: {{{family}: {{degree: 8}}}}\n"
    setup = setup_of(f"{text('dropout: 0.1', 8)}{parallel}checkpoint: {FORMS[form]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


VIT = """
model: {preset: vit-base-16, layers: 7, hidden: 256, ffn_hidden: 512, heads: 4, image_size: 64, CHANGES}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 2, accumulation: 2}
precision: {parameters: bf16}
"""
VIT_FORMS = FORMS | {"mlp": "{inside: mlp, reentrant: true}"}
SDPA_FORMS = {"norm discarded": "{discard: norm}", "attention": "{inside: attention, reentrant: true}"}


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        *(("dropout: 0.0", form) for form in (*VIT_FORMS.values(), *SDPA_FORMS.values())),
        *(("dropout: 0.1, attention: unfused", form) for form in VIT_FORMS.values()),
    ],
)
def test_vit_on_one_gpu(changes: str, form: str) -> None:
    setup = setup_of(f"{VIT.replace('CHANGES', changes)}checkpoint: {form}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


T5 = """
model: {preset: t5-small, layers: 5, decoder_layers: 5, hidden: 256, ffn_hidden: 512, vocab: 1024}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 2, seq_len: 64, target_len: 32}
precision: {parameters: bf16}
"""


@pytest.mark.parametrize("form", ["null", "{every: 1}", "{every: 2}", "{every: 1, save: [attention]}"])
@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
def test_t5_is_recorded_live(attention: str, form: str) -> None:
    setup = setup_of(f"{T5.replace('vocab', f'attention: {attention}, vocab')}checkpoint: {form}\n")
    assert_equal(record_training(setup, 2, stamps=True), record_training(setup, 2, stamps=False))


def test_layers_of_bert_are_stamped() -> None:
    run = TrainingRun(setup_of(text("dropout: 0.1") + "precision: {parameters: bf16}\n"), Recorder())
    run.tape.stamps = True
    with interpret(run.tape):
        run.initialize()
        run.step(0)
    assert any(t.forward is not None and t.backwards for t in run.tape.templates.values())
    run.finish()


MEGATRON = """
model: {preset: bert-base, implementation: megatron, layers: 8, hidden: 256, ffn_hidden: 512, heads: 4, vocab: 1024}
cluster: {gpu: a100, gpus_per_node: 4}
batch: {micro_batch: 2, seq_len: 128, accumulation: 4}
precision: {parameters: bf16, compute: bf16}
"""
MEGATRON_FORMS = ["null", "{reentrant: true}", "{inside: core_attention, reentrant: true}", "{discard: norm}"]


@pytest.mark.parametrize("form", MEGATRON_FORMS)
def test_megatrons_bert(form: str) -> None:
    setup = setup_of(f"{MEGATRON}parallel: {{tensor: {{degree: 2}}, data: {{degree: 2}}}}\ncheckpoint: {form}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("schedule", ["{degree: 2}", "{degree: 2, schedule: interleaved, virtual: 2}"])
def test_megatrons_bert_in_stages(schedule: str) -> None:
    setup = setup_of(f"{MEGATRON}parallel: {{tensor: {{degree: 2}}, pipeline: {schedule}}}\n")
    for rank in range(2):
        assert_equal(record_pipeline(setup, rank, 3, stamps=True), record_pipeline(setup, rank, 3, stamps=False))


@pytest.mark.parametrize("form", ["null", "{every: 1}"])
def test_megatrons_t5_is_recorded_live(form: str) -> None:
    model = (
        "model: {preset: t5-small, implementation: megatron, layers: 3, decoder_layers: 3, hidden: 256, vocab: 1024}"
    )
    rest = MEGATRON.split("\n", 2)[2].replace("seq_len: 128", "seq_len: 128, target_len: 64")
    parallel = "parallel: {tensor: {degree: 2, sequence_parallel: true}, data: {degree: 2}}"
    setup = setup_of(f"{model}\n{rest}{parallel}\ncheckpoint: {form}\n")
    assert_equal(record_training(setup, 2, stamps=True), record_training(setup, 2, stamps=False))
