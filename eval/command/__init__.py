"""The command `kvzip-eval`."""
