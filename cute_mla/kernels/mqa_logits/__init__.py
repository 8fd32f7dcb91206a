"""The indexer's logits: weighted sums of relu(q k) over the heads, for keys in a row or in the pages of an index cache."""
