"""How each family of transformers is sampled by rows: one file a family."""
