"""The GEMM rates that ship: judgements over all kernel sources (COSTS.md 1.4), made before any step was predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShippedRate:
    """`value`: E shipped; `range`: of the sources; `others`: E from sources that are not among the files read;
    `least_sigma`: relative uncertainty at least, where few sources exist."""

    value: float
    range: tuple[float, float]
    reason: str
    others: tuple[float, ...] = ()
    least_sigma: float = 0.05


SHIPPED = {
    "a100-sxm-80": ShippedRate(
        0.80,
        (0.79, 0.91),
        "judged (COSTS.md 1.4): the file fitted is the fastest of four (245-284 TFLOP/s), above what a search found",
        others=(0.907 * 245 / 284,),
    ),
    "a100-pcie": ShippedRate(0.765, (0.74, 0.81), "SimuMax (COSTS.md 1.4)"),
    "h100-sxm": ShippedRate(
        0.81, (0.75, 0.875), "judged (COSTS.md 1.4): between eager (Vidur) and inference kernels (aiconfigurator)"
    ),
    "h200-sxm": ShippedRate(
        0.77, (0.74, 0.86), "judged (COSTS.md 1.4, .74-.80): power sampled .737, another version .859", others=(0.859,)
    ),
    "gh200": ShippedRate(0.87, (0.84, 0.89), "one source, ett (COSTS.md 1.4)", least_sigma=0.08),
    "b200-sxm": ShippedRate(
        0.60, (0.49, 0.75), "judged (COSTS.md 1.4): SimuMax .49, power sampled .66, other version .748", others=(0.748,)
    ),
    "gb200": ShippedRate(0.63, (0.57, 0.73), "power sampled .634 (COSTS.md 1.4); versions differ", least_sigma=0.15),
    "l40s": ShippedRate(
        0.65, (0.60, 0.71), "judged (COSTS.md 1.4): lowered, versions give 186-269 TFLOP/s", others=(0.708 * 186 / 269,)
    ),
}
