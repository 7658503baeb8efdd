"""Presses to measure, and equal budgets for them."""
