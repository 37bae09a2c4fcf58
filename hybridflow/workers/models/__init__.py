"""Models: loading, and what transformers lacks."""
