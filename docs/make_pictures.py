"""Draw the pictures of the documents: python docs/make_pictures.py [name ...].

Most show strategies of a shipped scenario side by side, on the same scales; `offload` is one strategy's timeline.png, and
`page` a browser's view of the page (chromium, chromedriver and selenium are needed).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from sim.api import Outcome, load, shown_lanes, simulate_setup
from sim.report.figure import HOST_COLOUR, STACK, WORK_COLOURS, compare_figure, timeline_figure, title_of
from sim.report.picture import Picture, picture_of
from sim.units import format_bytes, format_duration

DOCS = Path(__file__).resolve().parent
SCENARIOS = DOCS.parent / "scenarios"
STRATEGIES, MEGATRON, CONTEXT = "strategies.yaml", "megatron_recompute.yaml", "context_parallel.yaml"
ADAPTERS, EXPERTS, SHARDING = "lora.yaml", "moe.yaml", "sharding_families.yaml"
COMPILED = "compiled.yaml"
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "segments": (STRATEGIES, ("none", "full", "every-2", "segments-of-4")),
    "sequential": (STRATEGIES, ("sequential-4", "uneven")),
    "nested": (STRATEGIES, ("segments-of-4", "nested-2x2x2")),
    "reentrant": (STRATEGIES, ("full", "reentrant")),
    "inside": (STRATEGIES, ("attention-inside", "mlp-inside", "selective", "per-layer")),
    "megatron": (MEGATRON, ("none", "core-attention", "all-three", "flash")),
    "compiled": (COMPILED, ("eager", "compiled", "loss-too", "float8")),
    "evaluation": (STRATEGIES, ("no_grad", "forgot-no_grad")),
    "optimizers": (STRATEGIES, ("none", "sgd", "adamw-8bit", "step-in-backward")),
    "loss": (STRATEGIES, ("whole-loss", "chunked-logits", "chunked-head", "none")),
    "adapters": (ADAPTERS, ("full", "frozen-half", "lora", "qlora", "lora-checkpoint")),
    "context": (CONTEXT, ("full", "ring", "all-gather")),
    "ulysses": ("ulysses.yaml", ("own", "ulysses", "fused-loss", "tiles")),
    "experts": (EXPERTS, ("balanced", "busy", "activation", "full")),
    "sharding": (SHARDING, ("ddp", "zero-1", "zero-3", "fsdp1-no-limit", "fsdp1", "fsdp2")),
}
"""Picture: scenario, and which of its strategies."""
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fsdp_ckpt": ("fsdp_ckpt.yaml", ("none", "selective", "every-2-layers", "full")),
    "encoders": ("bert_large.yaml", ("written-out", "attention-only", "fused", "fused-full")),
}
"""Pictures of other pages, docs/img/<name>.png."""
GREYS, TINTS = 24, (1.0, 0.8, 0.6, 0.4, 0.2)
"""Of the palette: steps from black to white, and how much of a colour is left where it is blended with white."""
CAPACITY = "#CC3311"
OF_PAGE = ("#0b62c4", "#1d7a3e", "#c22f12", "#1c2330", "#5c6675", "#d9dee6", "#f6f7f9")
"""Colours of page.css, light."""


def draw(name: str) -> Path:
    """One picture by its name."""
    if name in OTHERS:
        return OTHERS[name]()
    scenario, names = (FAMILIES | PAGES)[name]
    setups = {setup.name: setup for setup in load(SCENARIOS / scenario).strategies}
    figure = compare_figure([cell(simulate_setup(setups[strategy])) for strategy in names])
    return save(figure, f"img/{name}.png" if name in PAGES else f"img/strategies/{name}.png")


def save(figure: Any, name: str) -> Path:
    """A figure in the colours of the house alone, which makes it small and mixes none up."""
    image = BytesIO()
    figure.savefig(image, format="png", dpi=80)
    path = DOCS / name
    Image.open(image).convert("RGB").quantize(palette=palette(), dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def palette(*more: str) -> Image.Image:
    """All colours of owners and work and `more`, as they are and lighter, and greys."""
    colours = dict.fromkeys([(round(255 * i / (GREYS - 1)),) * 3 for i in range(GREYS)])
    for text in dict.fromkeys((*STACK.values(), *WORK_COLOURS.values(), HOST_COLOUR, CAPACITY, *more)):
        colour = [int(text[at : at + 2], 16) for at in (1, 3, 5)]
        colours |= {tuple(round(255 + (part - 255) * tint) for part in colour): None for tint in TINTS}
    flat = [part for colour in colours for part in colour]
    assert len(flat) <= 768, "a palette has 256 colours"
    image = Image.new("P", (1, 1))
    image.putpalette(flat + [255] * (768 - len(flat)))
    return image


def offload() -> Path:
    """docs/img/offload.png: half of the activations offloaded, as a run's timeline.png."""
    setups = {setup.name: setup for setup in load(SCENARIOS / "offload.yaml").strategies}
    outcome = simulate_setup(setups["offload-half"])
    picture = picture_of(outcome, shown_lanes(outcome))
    return save(timeline_figure(picture, title_of("offload", picture, outcome.headroom_bytes)), "img/offload.png")


def page() -> Path:
    """docs/img/page.png: the page with full recomputation chosen, and the cursor in its backward."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    from sim.report.page.build import COLOURS
    from sim.report.page.write import write_page

    options = webdriver.chrome.options.Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1200"):
        options.add_argument(flag)
    path = DOCS / "img" / "page.png"
    with tempfile.TemporaryDirectory() as folder:
        made = write_page(SCENARIOS / "fsdp_ckpt.yaml", Path(folder), ["none", "full"])
        driver = webdriver.chrome.service.Service(shutil.which("chromedriver"))
        browser = webdriver.Chrome(options=options, service=driver)
        browser.get(f"file://{made}")
        WebDriverWait(browser, 60).until(
            lambda driver: driver.execute_script("return document.documentElement.dataset.ready === 'yes'")
        )
        browser.execute_script(
            "choose(1); moveTo(0.56 * here().stepMs); document.documentElement.classList.remove('dark'); showAll()"
        )
        high = browser.execute_script("return document.getElementById('step').getBoundingClientRect().bottom")
        image = Image.open(BytesIO(browser.get_screenshot_as_png()))
        browser.quit()
    colours = palette(*COLOURS.values(), *OF_PAGE)
    seen = image.crop((0, 0, image.width, min(int(high), image.height))).convert("RGB")
    seen.quantize(palette=colours, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


OTHERS: dict[str, Callable[[], Path]] = {"offload": offload, "page": page}


def cell(outcome: Outcome) -> tuple[str, Picture]:
    """Title and picture of one strategy."""
    picture = picture_of(outcome, shown_lanes(outcome))
    step_ns = picture.step_ms * 1e6 if outcome.time is None else outcome.time.step_ns  # the mean where a cycle repeats
    return f"{outcome.name}: {format_duration(step_ns)}, peak {format_bytes(picture.peak_bytes)}", picture


if __name__ == "__main__":
    for name in sys.argv[1:] or (*FAMILIES, *PAGES, *OTHERS):
        print(draw(name))
