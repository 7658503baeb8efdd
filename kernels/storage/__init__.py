"""How packed pairs are stored: segments, and 8 or 4 bits a number."""
