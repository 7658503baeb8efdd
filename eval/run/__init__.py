"""From a grid of tasks and presses to records."""
