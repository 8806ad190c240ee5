"""Reports of a run's folder: pictures of its curves, and an HTML page."""
