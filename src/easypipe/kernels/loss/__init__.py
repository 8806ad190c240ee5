"""The loss of hidden states and a head, without all of the logits."""
