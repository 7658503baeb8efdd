"""Attention and scoring kernels over ragged KV storage; they know nothing of presses or of transformers."""

# Seen from the repository's root, transformers' `is_kernels_available` takes this folder for Hugging Face's package of
# that name and parses its version
__version__ = "0.0.0"
