"""Kernels beside their baselines, verified before they are timed: ``python -m kvzip_press.kernels.bench``."""
