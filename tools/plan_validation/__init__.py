"""Compare predictions of ``hvd-compress plan`` with measured steps."""
