"""Tasks to measure compressed caches on: contexts, questions, and what counts as right."""
