"""The command ``hvd-compress methods``."""
