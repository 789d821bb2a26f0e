"""MovieLens-100K for the examples: the data, a ranking model, and reports."""
