"""What a results folder says, as tables and as a page."""
