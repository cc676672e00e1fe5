"""How fast is it? Whole steps and bare exchanges under real Horovod, side by side in the same processes."""
