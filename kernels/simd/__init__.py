"""Explicit vectors and threads of the CPU backend."""
