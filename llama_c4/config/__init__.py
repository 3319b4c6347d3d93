"""Configuration: checked once, at the edge, before torch is imported; then a frozen tree."""
