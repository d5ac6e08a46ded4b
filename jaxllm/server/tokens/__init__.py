"""Routes that take token ids and return ids, or scores of ids, instead of texts."""
