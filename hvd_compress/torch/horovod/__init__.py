"""Connection to Horovod: its calling frames, its collectives, and what it reduces instead of gradients."""
