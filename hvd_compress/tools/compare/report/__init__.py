"""What a comparison has found, in words, as tables and pictures, and as a page."""
