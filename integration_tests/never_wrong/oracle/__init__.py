"""The byte oracle: random cases, the truth about them, and production driven by hand."""
