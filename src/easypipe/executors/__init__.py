"""Where parts of a preparation run when one machine is not enough."""
