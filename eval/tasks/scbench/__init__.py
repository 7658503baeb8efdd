"""SCBench (https://arxiv.org/abs/2412.10319)."""
