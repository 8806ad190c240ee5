"""The source stage opens a dataset's files, or its rows in memory, as a source."""
