"""What a run's folder tells: pictures of its curves, and its report as a page."""
