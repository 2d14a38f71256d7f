"""Fits of the cost forms to published kernel measurements: one script per family; they write `sim/cost/profiles`.

    python -m calibration.fit.all [FOLDER] [--plots FOLDER]

FOLDER holds the csv files (default: shared/data/kernels beside the repository). No whole-step time is read.
"""
