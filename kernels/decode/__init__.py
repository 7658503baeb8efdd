"""Attention over ragged packed pairs and a dense tail, a file a backend."""
