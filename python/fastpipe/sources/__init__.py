"""Sources of rows, a package or a file each."""
