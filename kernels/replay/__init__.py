"""Attention of replayed tokens with the scores of the context's pairs, a file a backend."""
