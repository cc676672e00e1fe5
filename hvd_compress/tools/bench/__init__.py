"""What the command ``hvd-compress`` does: list the methods, measure their error, and write both down."""
