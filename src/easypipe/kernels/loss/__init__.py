"""The loss of hidden states and a head, without holding all of the logits."""
