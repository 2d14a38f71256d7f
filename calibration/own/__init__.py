"""From measured points to a profile of one's own: fits with the forms of `sim.cost`, exact shapes, errors, plots.

`calibrate` is what `python -m sim calibrate` runs. No file here imports torch; only `calibrate` starts what does.
"""
