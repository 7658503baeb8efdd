"""How answers are judged."""
