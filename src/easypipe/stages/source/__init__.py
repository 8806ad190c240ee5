"""The source stage: a dataset's files or rows become a source."""
