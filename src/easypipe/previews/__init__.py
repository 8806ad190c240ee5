"""Shows the first samples of a config, decoded, and which parts are trained on."""
