"""Compare predictions of ``hvd-compress advise`` with measured steps."""
