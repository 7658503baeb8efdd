"""Measurements of a compressed cache: retrieval, fidelity to the full cache, and cost."""
