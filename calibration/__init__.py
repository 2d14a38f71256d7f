"""Measuring kernels and fitting cost profiles. Nothing in `sim` imports it."""
