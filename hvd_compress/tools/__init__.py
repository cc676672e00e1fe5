"""The command ``hvd-compress``."""
