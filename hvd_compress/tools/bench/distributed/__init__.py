"""Speed under Horovod: whole steps and bare exchanges, side by side in the same processes."""
