"""What stands around a method: what is kept, when and where it compresses, and how well."""
