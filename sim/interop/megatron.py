"""Megatron-LM's arguments as a scenario: the network, the batch, precision; `megatron_parallel` does the rest.

Where Megatron's own checks change an argument (validate_args: sequence parallelism without tensor parallelism, fp32
sums under bf16, the width of a SwiGLU MLP, ...), so does this.
"""

from __future__ import annotations

from pathlib import Path

from sim.interop.cluster import put_cluster
from sim.interop.draft import Draft, Imported, ImportProblems
from sim.interop.megatron_experts import put_experts
from sim.interop.megatron_parallel import put_parallel, put_recomputation
from sim.interop.megatron_read import read_arguments
from sim.interop.options import Options
from sim.interop.shapes import choose, put_preset
from sim.interop.table import load_table
from sim.model.config import Family


def import_megatron(path: Path, text: str, options: Options) -> Imported:
    """A scenario from a launch script or a file of arguments. Raises ImportProblems."""
    table = load_table("megatron")
    raws, problems, undecided = read_arguments(path, text, table, options.variables)
    if problems:
        raise ImportProblems(problems)
    draft = Draft(path, table, options, raws)
    for line in undecided:
        draft.undecided(line)
    family = _family(draft)
    _put_model(draft, family)
    gpus = put_cluster(draft, "nnodes", "nproc-per-node")
    put_experts(draft, family)
    degrees = put_parallel(draft, gpus)
    _put_vocabulary(draft, degrees.tensor)
    _put_batch(draft, degrees.data)
    _put_precision(draft)
    _put_fp8(draft)
    _put_optimizer(draft)
    put_recomputation(draft, degrees)
    draft.direct()
    return draft.finish(path.stem)


def _family(draft: Draft) -> Family:
    """Gated MLPs with SiLU, and squared ReLU beside rotary positions, are Llama's; everything else is a GPT."""
    activations = draft.table.facts["activations"]
    named = activations.get(draft.get("activation-func")) if draft.has("activation-func") else None
    if named == "swiglu":
        draft.use("activation-func", "SwiGLU")
    elif draft.has("activation-func"):
        draft.use("activation-func", "GELU") if named == "gelu" else draft.cannot(
            "activation-func", "another activation"
        )
    for name in ("quick-geglu", "openai-gelu"):
        if draft.has(name):
            draft.cannot(name, "another activation")
    gated = named == "swiglu" or draft.has("swiglu")
    draft.use("swiglu", "a Llama-like network: SwiGLU")
    squared = draft.has("squared-relu") and not gated
    if draft.has("squared-relu") and not (squared and _is_rotary(draft)):
        draft.cannot("squared-relu", "squared ReLU beside a gate or learned positions")
        squared = False
    return "llama" if gated or squared else "gpt"


def _is_rotary(draft: Draft) -> bool:
    return bool(draft.has("use-rotary-position-embeddings") or draft.get("position-embedding-type") == "rope")


SHAPES = {"layers": "num-layers", "hidden": "hidden-size", "heads": "num-attention-heads"}


def _put_model(draft: Draft, family: Family) -> None:
    needed = {**SHAPES, "max_positions": "max-position-embeddings"}
    for field, name in needed.items():
        if not draft.has(name) and draft.override(f"model.{field}") is None:
            draft.problem(name, "is missing")
    hidden, heads = draft.get("hidden-size"), draft.get("num-attention-heads")
    width, kv_heads = draft.get("ffn-hidden-size"), heads
    if width is None and hidden:
        gated = family == "llama" and not draft.has("squared-relu")
        width = int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden
    if draft.has("group-query-attention"):
        kv_heads = draft.get("num-query-groups")
    shapes = {field: draft.get(name) for field, name in SHAPES.items()}
    put_preset(draft, family, {**shapes, "ffn_hidden": width, "kv_heads": kv_heads}, draft.has("num-experts"))
    draft.put("model.implementation", "megatron", note="the script is Megatron-LM's")
    for field, name in needed.items():
        if draft.has(name):
            draft.put(f"model.{field}", draft.get(name), name)
    if width:
        draft.put(
            "model.ffn_hidden",
            width,
            "ffn-hidden-size",
            note="" if draft.has("ffn-hidden-size") else "from --hidden-size",
        )
    if draft.has("group-query-attention"):
        draft.put("model.kv_heads", kv_heads, "group-query-attention", "num-query-groups")
    elif heads:
        draft.put("model.kv_heads", heads, "group-query-attention", note="one for each head")
    tied = not draft.has("untie-embeddings-and-output-weights")
    draft.put("model.tied_embeddings", tied, "untie-embeddings-and-output-weights")
    _put_layer_choices(draft, family)


def _put_layer_choices(draft: Draft, family: Family) -> None:
    """Norms, positions, biases, activation, dropout and attention; what Megatron's layers of this family cannot be is
    told."""
    if family == "llama" and draft.has("squared-relu"):
        draft.put("model.activation", "squared_relu", "squared-relu")
    norm, usual = draft.get("normalization"), "RMSNorm" if family == "llama" else "LayerNorm"
    if str(norm).lower() == usual.lower():
        draft.use("normalization", f"the usual norm of a {family}")
    elif family == "llama" and str(norm).lower() in ("layernorm", "layernorm1p"):
        draft.put("model.norm", "layer_norm", "normalization")
    else:
        draft.cannot("normalization", f"{norm} in a {family}-like network")
    rotary = _is_rotary(draft)
    for name in ("use-rotary-position-embeddings", "position-embedding-type", "no-position-embedding"):
        if rotary == (family == "llama"):
            draft.use(name, "the usual positions")
    if rotary != (family == "llama"):
        kind = "rotary" if rotary else draft.get("position-embedding-type")
        draft.cannot("position-embedding-type", f"{kind} positions in a {family}-like network")
    biased = not draft.has("disable-bias-linear") and draft.get("bias") is not False
    draft.use("disable-bias-linear", "no biases")
    draft.use("bias", "biases" if biased else "no biases")
    choose(draft, "bias", biased, "disable-bias-linear", what="biases" if biased else "layers without biases")
    if draft.has("add-qkv-bias"):
        choose(draft, "qkv_bias", True, "add-qkv-bias", what="biases of q, k and v")
    if draft.has("qk-layernorm") and not draft.has("multi-latent-attention"):
        choose(draft, "qk_norm", True, "qk-layernorm", what="norms of q and k")
    hidden, attention = draft.get("hidden-dropout"), draft.get("attention-dropout")
    if hidden != attention:
        draft.cannot("attention-dropout", f"dropout {attention} in attention, but {hidden} elsewhere")
        choose(draft, "dropout", hidden, "hidden-dropout", what=f"dropout {hidden}")
    else:
        choose(draft, "dropout", hidden, "hidden-dropout", "attention-dropout", what=f"dropout {hidden}")
    fused = not draft.has("no-bias-dropout-fusion")
    choose(draft, "bias_dropout_fusion", fused, "no-bias-dropout-fusion", what="dropout and residual apart")
    persistent = not draft.has("no-persist-layer-norm")
    choose(draft, "persistent_norm", persistent, "no-persist-layer-norm", what="persistent kernels for norms")
    if draft.has("cross-entropy-loss-fusion"):
        kind = draft.get("cross-entropy-fusion-impl") or "native"
        choose(
            draft, "loss_fusion", kind, "cross-entropy-loss-fusion", "cross-entropy-fusion-impl", what="fused losses"
        )
    if family == "gpt":
        fused = not draft.has("no-bias-gelu-fusion") and biased
        choose(draft, "bias_gelu_fusion", fused, "no-bias-gelu-fusion", what="bias and GELU in one kernel")
    _put_attention(draft)


def _put_attention(draft: Draft) -> None:
    """Transformer Engine picks a fused kernel; Megatron's own layers write attention out unless told otherwise."""
    backend = str(draft.get("attention-backend")).lower().removeprefix("attnbackend.")
    local = draft.get("transformer-impl") == "local"
    written_out = backend in ("unfused", "local") or (local and not draft.has("use-flash-attn"))
    names = [name for name in ("attention-backend", "transformer-impl", "use-flash-attn") if draft.has(name)]
    value = "unfused" if written_out else "sdpa"
    if not written_out:
        draft.use("no-masked-softmax-fusion", "a fused kernel has no softmax of its own")
    choose(draft, "attention", value, *(names or ["transformer-impl"]), what="attention written out")


def _put_vocabulary(draft: Draft, tensor: int) -> None:
    """Rows of the embedding: padded to a multiple of make-vocab-size-divisible-by x tensor-parallel ranks."""
    if draft.override("model.vocab") is not None:
        for name in ("vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by", "tokenizer-type"):
            draft.use(name, "not used: --set model.vocab says it")
        return
    if draft.has("padded-vocab-size"):
        draft.put("model.vocab", draft.get("padded-vocab-size"), "padded-vocab-size")
        return
    tokenizer, sizes = draft.get("tokenizer-type"), draft.table.facts["tokenizers"]
    size, names = draft.get("vocab-size"), ["vocab-size"]
    if size is not None and tokenizer in ("NullTokenizer", "NullMultimodalTokenizer"):
        size, names = size + 1, ["vocab-size", "tokenizer-type"]  # its end-of-document token
    elif size is None and tokenizer in sizes:
        size, names = sizes[tokenizer], ["tokenizer-type"]
    if size is None:
        asked = f"the size of {tokenizer}'s vocabulary is in other files" if tokenizer else "no vocabulary is named"
        draft.problem("vocab-size", f"{asked}: give --set model.vocab=128256 (rows of the embedding, padded)")
        return
    multiple = draft.get("make-vocab-size-divisible-by") * tensor
    padded = -(-size // multiple) * multiple if multiple > 0 else size
    note = f"{size} padded to a multiple of {multiple}"
    draft.put("model.vocab", padded, *names, "make-vocab-size-divisible-by", note=note)


def _put_batch(draft: Draft, data: int) -> None:
    for path, name in (("batch.micro_batch", "micro-batch-size"), ("batch.seq_len", "seq-length")):
        if not draft.has(name) and draft.override(path) is None:
            draft.problem(name, "is missing")
    micro = draft.override("batch.micro_batch") or draft.get("micro-batch-size")
    if draft.has("rampup-batch-size"):
        draft.use("rampup-batch-size", "the batch after the ramp is taken")
    if not draft.has("global-batch-size"):
        draft.put("batch.accumulation", 1, "global-batch-size")
        return
    total = draft.get("global-batch-size")
    if type(micro) is not int or micro < 1 or total is None:
        return
    accumulation, rest = divmod(total, micro * data)
    if rest or accumulation < 1:
        draft.problem("global-batch-size", f"{total} is no multiple of micro-batch {micro} x {data} replicas")
        return
    draft.put("batch.accumulation", accumulation, "global-batch-size", note=f"{data} x {micro} sequences at a time")


def _put_precision(draft: Draft) -> None:
    """16-bit parameters with fp32 main parameters; gradients are summed in fp32 under bf16 unless told otherwise."""
    named = str(draft.get("precision") or "").lower()
    bf16, fp16 = draft.has("bf16") or "bf16" in named, draft.has("fp16") or named in ("16", "fp16", "16-mixed")
    if bf16 == fp16:
        draft.problem(
            "bf16", "both --bf16 and --fp16 are given" if bf16 else "without --bf16 or --fp16: fp32 is not modelled"
        )
        return
    dtype = "bf16" if bf16 else "fp16"
    source = dtype if draft.has(dtype) else "precision"
    draft.put("precision.parameters", dtype, source)
    draft.put("precision.compute", dtype, source)
    draft.use("precision", f"{dtype} parameters and products")
    in_fp32 = draft.has("accumulate-allreduce-grads-in-fp32") or bf16
    names = ["accumulate-allreduce-grads-in-fp32"]
    if draft.has("grad-reduce-in-bf16"):
        in_fp32, names = False, ["grad-reduce-in-bf16"]
    note = "Megatron sets it for bf16" if bf16 and not draft.has(names[0]) else ""
    draft.put("precision.reduce", "fp32" if in_fp32 else dtype, *names, note=note)
    draft.use("accumulate-allreduce-grads-in-fp32", "not used: --grad-reduce-in-bf16 counts")


def _put_fp8(draft: Draft) -> None:
    """Transformer Engine's 8- or 4-bit products; what belongs to them says nothing without them."""
    edges = ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16")
    kind = next((kind for kind in ("fp8", "fp4") if draft.has(f"{kind}-format")), None)
    for other in ("fp8", "fp4"):
        if other != kind:
            draft.use(f"{other}-recipe", f"not used: without --{other}-format")
    if kind is None:
        for name in ("fp8-param-gather", "first-last-layers-bf16", *edges):
            draft.use(name, "not used: without --fp8-format")
        return
    recipe = draft.get(f"{kind}-recipe")
    if recipe not in (("delayed", "tensorwise", "mxfp8", "blockwise") if kind == "fp8" else ("nvfp4",)):
        draft.cannot(f"{kind}-recipe", "another way to find scales: 16-bit products are played")
        return
    draft.put(f"precision.{kind}", recipe, f"{kind}-format", f"{kind}-recipe")
    if draft.has("fp8-param-gather") and recipe not in ("delayed", "tensorwise"):
        draft.cannot("fp8-param-gather", "weights stored with scales of blocks: 16-bit weights are played")
    elif draft.has("fp8-param-gather"):
        draft.put("parallel.data.fp8_parameters", True, "fp8-param-gather")
    first, last = (draft.get(name) for name in edges)
    if draft.has("first-last-layers-bf16") and first == last:
        draft.put("precision.fp8_edge_layers", first, "first-last-layers-bf16", *edges)
    elif draft.has("first-last-layers-bf16"):
        draft.cannot("first-last-layers-bf16", "other numbers of 16-bit layers at the start than at the end")
    for name in edges:
        draft.use(name, "not used: without --first-last-layers-bf16")


def _put_optimizer(draft: Draft) -> None:
    if draft.get("optimizer") not in (
        "adam",
        "adamw",
        "fused_adam",
        "distributed_fused_adam",
        "mcore_distributed_optim",
    ):
        draft.cannot("optimizer", "another optimizer than Adam")
    draft.use("optimizer", "Adam on fp32 main parameters")
    clip = draft.get("clip-grad")
    draft.put("optimizer.clip_norm", clip if clip else None, "clip-grad")
    draft.put("optimizer.zero_grad", "start", note="Megatron clears gradients at the start of a step")
