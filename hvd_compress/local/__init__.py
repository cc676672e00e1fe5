"""Train alone for some steps, then average models: the settings, the arithmetic, and what is due after each step."""
