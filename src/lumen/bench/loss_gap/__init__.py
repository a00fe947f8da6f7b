"""The loss-gap table: what each recipe costs in held-out loss, beside an independent implementation of the same."""
