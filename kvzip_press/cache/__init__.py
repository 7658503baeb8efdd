"""What a compressed context is stored in: cache layers, eviction into them, and what they hold."""
