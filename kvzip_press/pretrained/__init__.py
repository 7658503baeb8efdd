"""Models to start with: the packaged SmolLM2, whatever transformers loads, and the demo's layout."""
