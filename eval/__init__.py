"""Measurements of compressed caches beside kvpress's presses."""
