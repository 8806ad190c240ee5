"""Shows the first samples of a config, decoded, with what is trained of them."""
