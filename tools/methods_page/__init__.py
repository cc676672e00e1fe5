"""Write ``docs/methods.md``."""
