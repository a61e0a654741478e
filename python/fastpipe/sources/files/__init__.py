"""Files that sources read: paths, folders, contents in memory, indexes that are kept."""
