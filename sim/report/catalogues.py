"""What a scenario can name, as tables: GPUs and model presets."""

from __future__ import annotations

from rich import box
from rich.table import Table

from sim.hardware.catalogue import find_gpu, gpu_names
from sim.model.catalogue import build_model, implementations_of, preset_names, preset_shapes
from sim.model.flops import active_parameter_count, parameter_count
from sim.units import format_bandwidth, format_bytes, format_compute


def gpu_table() -> Table:
    """The catalogue of GPUs; every spelling in the last column is understood too."""
    table = plain_table("gpu", "usable", "16-bit peak", "memory", "GPU link", "also called")
    for name in gpu_names():
        gpu = find_gpu(name)
        peaks = dict(gpu.peaks)
        link = format_bandwidth(gpu.gpu_link_bytes_per_s) if gpu.gpu_link_bytes_per_s else "none"
        table.add_row(
            name,
            format_bytes(gpu.usable_memory_bytes),
            format_compute(peaks.get("bf16", peaks.get("fp16", 0))),
            format_bandwidth(gpu.memory_bandwidth_bytes_per_s),
            link,
            ", ".join(gpu.aliases),
        )
    return table


def preset_table() -> Table:
    """The presets with their published shapes, and whose code can be imitated (the first is the default)."""
    table = plain_table("preset", "parameters", "active", "layers", "hidden", "heads", "vocabulary", "implementations")
    for name in preset_names():
        shapes = preset_shapes(name)
        model = build_model(name, shapes)
        table.add_row(
            name,
            f"{parameter_count(model) / 1e9:,.2f} B",
            f"{active_parameter_count(model) / 1e9:,.2f} B" if model.experts is not None else "",
            f"{model.layers} + {model.decoder_layers}" if model.decoder_layers else str(model.layers),
            f"{model.hidden:,}",
            str(model.heads),
            f"{model.vocab:,}" if model.vocab else "",
            ", ".join(implementations_of(model.family, shapes)),
        )
    return table


def plain_table(*headings: str) -> Table:
    """Names left, figures right, the last column (words) left."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        inside = 0 < number < len(headings) - 1
        table.add_column(heading, justify="right" if inside else "left", no_wrap=number == 0)
    return table
