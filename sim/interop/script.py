"""What a training script of transformers is taken to do where its configuration files do not say."""

from __future__ import annotations

from sim.interop.draft import Draft

OPTIONS = {
    "model": ("model", "--model", "is missing: a preset or a config.json, e.g. --model llama-3.1-8b"),
    "seq_len": ("batch.seq_len", "--seq-len", "is missing: tokens per sequence, e.g. --seq-len 4096"),
}


def needs(draft: Draft, *names: str) -> None:
    """Options that only the person who imports can give."""
    for name in names:
        path, option, message = OPTIONS[name]
        if not draft.override(path):
            draft.problem(option, message)


def put_script(draft: Draft) -> None:
    """transformers' model code, and its Trainer's host costs."""
    draft.put("model.implementation", "transformers", note="a script of transformers is assumed")
    draft.put("host.framework", "transformers", note="the host costs of its Trainer")
