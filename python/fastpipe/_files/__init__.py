"""Files that sources read: paths, folders, contents in memory and cached indexes."""
