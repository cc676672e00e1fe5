"""What stands around a method: where and when it compresses."""
