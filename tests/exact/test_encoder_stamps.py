"""Stamped layers of encoders give the program that recording every layer gives."""

from __future__ import annotations

import pytest

from sim.model.calls import interpret
from sim.runtime.recorder import Recorder
from sim.runtime.train import TrainingRun, record_training
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
def test_bert_under_fsdp(form: str) -> None:
    setup = setup_of(f"{text('dropout: 0.1', 8)}parallel: {{fsdp: {{degree: 8}}}}\ncheckpoint: {FORMS[form]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


def test_layers_of_bert_are_stamped() -> None:
    run = TrainingRun(setup_of(text("dropout: 0.1") + "precision: {parameters: bf16}\n"), Recorder())
    run.tape.stamps = True
    with interpret(run.tape):
        run.initialize()
        run.step(0)
    assert any(t.forward is not None and t.backwards for t in run.tape.templates.values())
    run.finish()
