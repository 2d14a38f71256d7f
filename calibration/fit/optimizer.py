"""Time per parameter of a fused Adam against bytes / (eta BW).

    python -m calibration.fit.optimizer [FOLDER] [--plots FOLDER]

One usable set: estimate-train-time on A100, optimizers of middle pipeline stages without tensor parallelism. What
those steps contain besides Adam is not established, so the share that ships is judged (COSTS.md 6.1).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from calibration.fit.command import main
from calibration.fit.evidence import Cloud, Errors, FamilyFit, Floats, Row, held_out, read, significant, spread
from calibration.fit.solve import fit
from sim.cost.figures import CARRIED_SIGMA, SINGLE_SOURCE, Figure
from sim.hardware.catalogue import find_gpu

PARAMETERS_PER_LAYER = 12  # h^2 of a GPT layer: attention 4, MLP 8
BYTES_PER_PARAMETER = 30  # fused Adam with fp32 master weights and 16-bit copies, by counting: 28-30
SHIPPED = 0.85
WITH_MORE_BYTES = 0.87
"""Share of bandwidth if those steps move 35 B per parameter (COSTS.md 6.1)."""


def fit_optimizer(folder: Path) -> FamilyFit:
    """Share of bandwidth at 30 B per parameter."""
    result = FamilyFit("optimizer")
    rows = read(folder, "operators")
    rows = rows[(rows.op == "middleStage_optimizer") & (rows.gpu == "a100_sxm") & (rows.mp == 1)]
    parameters = np.asarray(PARAMETERS_PER_LAYER * rows.dim**2 * rows.encoders, float)
    us, out = rows.dur.to_numpy(float), held_out(len(rows))
    bandwidth = find_gpu("a100-sxm-80gb").memory_bandwidth_bytes_per_s

    def predict(eta: float, part: Floats = parameters) -> Floats:
        return np.asarray(part * BYTES_PER_PARAMETER / (eta * bandwidth) * 1e6)

    bounds = {"eta": (0.8, 0.1, 1.2)}
    half = fit(lambda eta: predict(eta, parameters[~out]), us[~out], bounds)
    predicted = predict(half["eta"], parameters[out])
    errors = Errors.of(predicted, us[out])
    whole = significant(fit(predict, us, bounds)["eta"])
    picoseconds = f"{np.median(us / parameters * 1e6):.1f} ps/parameter"
    what = f"ett Adam of middle stages, {picoseconds}: eta {whole:g} at {BYTES_PER_PARAMETER} B"
    result.rows.append(Row("optimizer", "a100-sxm-80", what, "held out", errors, "19.8-22.9 ps (quartiles)"))
    shipped = Errors.of(predict(SHIPPED), us)
    result.rows.append(Row("optimizer", "a100-sxm-80", f"the same at the shipped {SHIPPED:g}", "other source", shipped))
    result.clouds.append(Cloud("a100-sxm-80 Adam, held out", parameters[out], us[out], predicted, "parameters"))
    source = f"ett A100 Adam, {picoseconds}: {BYTES_PER_PARAMETER} B at {whole:g}, or 35 B at {WITH_MORE_BYTES}"
    name = "memory.optimizer.bandwidth_efficiency"
    sigma = spread([whole, WITH_MORE_BYTES], SHIPPED)
    result.ship("a100-sxm-80", {
        name: Figure(SHIPPED, "assumed", f"judged (COSTS.md 6.1); {source}", sigma=sigma),
        "memory.optimizer.fixed_us": Figure(3.0, "assumed", "3 us GPU floor per kernel (COSTS.md 3 and 6.1)"),
        SINGLE_SOURCE + name: Figure(whole, "published", source, f"{errors} held out"),
    })  # fmt: skip
    carried = round(float(np.hypot(sigma, CARRIED_SIGMA)), 2)
    result.ship("h100-sxm", {
        name: Figure(SHIPPED, "assumed", f"as A100: judged (COSTS.md 6.1); {source}", sigma=carried),
        "memory.optimizer.fixed_us": Figure(2.0, "assumed", "floor of a kernel"),
    })  # fmt: skip
    return result


if __name__ == "__main__":
    main(fit_optimizer)
