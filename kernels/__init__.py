"""Attention and scoring kernels over ragged KV storage; they know nothing of presses or of transformers."""

__version__ = "0.0.0"
