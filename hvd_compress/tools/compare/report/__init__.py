"""The report of a comparison: words, tables, figures and a page."""
