"""Sources of rows: one package or file for each."""
