"""RULER (https://arxiv.org/abs/2404.06654)."""
